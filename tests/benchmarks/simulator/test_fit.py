from __future__ import annotations

import random
from dataclasses import astuple
from itertools import count

import pytest

from benchmarks.simulator.fit import StepRecorder
from cluster.lab.recorded.cost_fit import fit_cost
from cluster.lab.simulator.cost_model import LinearCostModel, Measured, Work, read_cost
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.errors import InvalidParameter
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from tests.models import make_model


def works(size: int) -> list[Work]:
    rng = random.Random(0)
    found = []
    for _ in range(size):
        sequences = rng.randint(1, 64)
        context = sequences * rng.randint(1, 2000)
        prompt = rng.choice([0, 0, rng.randint(1, 500)])
        pairs = context + prompt * rng.randint(1, 2000)
        found.append(Work(sequences + prompt, sequences, pairs, context))
    return found


def test_a_cost_is_found_again_from_what_it_says():
    cost = LinearCostModel(step_s=1e-3, token_s=2e-5, sequence_s=3e-5, pair_s=1e-8, context_s=2e-8)
    found = fit_cost(works(200), [cost.seconds(*work) for work in works(200)])
    assert astuple(found.cost) == pytest.approx(astuple(cost), rel=1e-3)
    assert found.error < 1e-6


def test_no_part_of_a_fitted_cost_is_negative_however_noisy_the_steps():
    rng = random.Random(1)
    found = fit_cost(works(60), [rng.uniform(1e-3, 3e-3) for _ in range(60)])
    assert min(astuple(found.cost)) >= 0
    assert 0.01 < found.error < 1


def test_steps_of_a_real_engine_are_recorded_while_it_is_watched_and_not_after(tmp_path):
    folder = make_model(tmp_path, "llama", num_hidden_layers=1)
    core = build_engine(
        EngineConfig(
            model=str(folder), dtype="float32", num_gpu_blocks_override=64, num_threads=1, async_scheduling=False
        )
    )
    ticks = count()
    with StepRecorder(core, clock=lambda: float(next(ticks))) as recorder:
        run_one(core, prompt=[5] * 20, output=3)
    run_one(core, prompt=[6] * 20, output=3)
    core.close()
    assert recorder.works == [Work(20, 1, 210, 20), Work(1, 1, 21, 21), Work(1, 1, 22, 22)]
    assert recorder.seconds == [1.0, 1.0, 1.0]


def run_one(core: EngineCore, prompt: list[int], output: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    core.add(GenerateRequest(request_id="r", prompt=prompt, params=params))
    while core.has_work:
        core.step()


def test_few_steps_are_no_ground_for_a_fit():
    with pytest.raises(ValueError, match="too few"):
        fit_cost(works(3), [1.0] * 3)


def test_a_fitted_cost_survives_its_file(tmp_path):
    found = fit_cost(works(50), [1e-3 * work.tokens for work in works(50)])
    found.write(tmp_path / "cost.json")
    assert read_cost(tmp_path / "cost.json") == Measured(found.cost)
    (tmp_path / "cost.json").write_text("{}")
    with pytest.raises(InvalidParameter, match=r"benchmarks\.simulator\.fit"):
        read_cost(tmp_path / "cost.json")
