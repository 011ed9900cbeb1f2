from __future__ import annotations

import random
from dataclasses import astuple
from itertools import count

import pytest

from cluster.simulator.calibration import StepRecorder, fit_cost
from cluster.simulator.cost_model import LinearCostModel, Measured, Work, read_cost
from cluster.simulator.hardware import CARDS, MODELS, find_model, kv_tokens, roofline
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.errors import InvalidParameter
from engine.wire.messages import GenerateRequest
from engine.wire.plan import StepPlan
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


def test_work_of_a_plan_counts_pairs_as_causal_attention_does():
    plan = StepPlan(1, [], [], slots=[0, 1], starts=[10, 0], counts=[1, 3], samples=[True, True])
    # the one token sees 11; the three see 1, 2 and 3
    assert Work.of(plan) == Work(tokens=4, sequences=2, pairs=11 + 6, context=11 + 3)


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
    core = EngineCore.build(
        EngineConfig(model=str(folder), dtype="float32", num_blocks=64, num_threads=1, overlap=False)
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


def test_a_step_takes_what_the_data_sheet_allows():
    cost = roofline(MODELS["llama-3.1-8b"], CARDS["h100"])
    decode, prompt = cost.seconds(1, 1, 1000, 1000), cost.seconds(2000, 1, 2_000_000, 2000)
    assert decode > 16.06e9 / 3.35e12  # all weights are read
    assert prompt > 2 * 8.03e9 * 2000 / 989e12
    assert roofline(MODELS["llama-3.1-8b"], CARDS["h100"], 4).seconds(1, 1, 1000, 1000) < decode


def test_what_weights_leave_of_the_memory_is_for_kv():
    assert kv_tokens(MODELS["llama-3.1-8b"], CARDS["h100"]) == pytest.approx(400_000, rel=0.1)
    with pytest.raises(InvalidParameter, match="tensor_parallel"):
        kv_tokens(MODELS["llama-3.1-70b"], CARDS["h100"])


def test_a_model_folder_says_how_large_the_model_is(tmp_path):
    make_model(tmp_path, "qwen3")
    shape = find_model(str(tmp_path))
    assert 0 < shape.active == shape.parameters
    with pytest.raises(InvalidParameter, match=r"config\.json"):
        find_model(str(tmp_path / "nothing"))


def test_a_fitted_cost_survives_its_file(tmp_path):
    found = fit_cost(works(50), [1e-3 * work.tokens for work in works(50)])
    found.write(tmp_path / "cost.json")
    assert read_cost(tmp_path / "cost.json") == Measured(found.cost)
    (tmp_path / "cost.json").write_text("{}")
    with pytest.raises(InvalidParameter, match="manta simulate fit"):
        read_cost(tmp_path / "cost.json")
