"""The whole engine over pipeline stages, each rank a process: the same bits as on one rank."""

from __future__ import annotations

import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError, EngineUnavailable
from engine.model.config import ModelConfig
from engine.model.loader import load_weights
from engine.model.models.registry import build_model
from engine.model.shard import ShardPlan
from engine.model.stage import config_of, divide, nth_stage
from engine.offline.llm import LLM
from engine.options.speculation import SpeculativeConfig
from engine.parts.costs.cost_ledger import CostLedger
from engine.parts.stages.rank.pipeline_stage import divide_layers
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.images import PromptImages
from engine.wire.parts.speculation import SpecDecodeStats
from engine.wire.parts.stages import StageReport
from engine.wire.sampling_params import SamplingParams
from tests.deltas import deltas_of
from tests.engine.offline.test_tensor_parallel import BUSY, Outcome, make_config, random_prompt, run, run_mixed
from tests.engine.spec_decode.draft_checkpoints import make_drafters
from tests.fake_drafter import draft_always
from tests.late_engine import answer, generate, requests, small_config, use_device
from tests.models import make_model, with_slow
from tests.products import pairwise, slow
from tests.rank_pool import RankPool, run_worker
from tests.tape import TapedDevice
from tests.vision_models import Prompt, make_vision_model

LAYERS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4},
    "gemma3": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"],
    },
    "qwen3_moe": {"num_hidden_layers": 4},
    "deepseek_v3": {"num_hidden_layers": 4},
    "qwen3_next": {},
}

SHAPES = [(2, 1), (4, 1), (2, 2)]  # stages, and ranks of each


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @cache
    def make(family: str) -> Path:
        return make_model(tmp_path_factory.mktemp(family), family, **LAYERS[family])

    return make


def staged(folder: Path, stages: int, ranks: int = 1, **options: Any) -> EngineConfig:
    return make_config(
        folder, ranks, pipeline_parallel_size=stages, **{**BUSY, "num_gpu_blocks_override": 64, **options}
    )


@pytest.fixture(scope="module")
def on_one_rank(pool, folder_of):
    """What one rank makes of the mixed requests."""

    @cache
    def run(family: str, dtype: str) -> Outcome:
        with pool.engine(staged(folder_of(family), 1, dtype=dtype, determinism="strict")) as core:
            return run_mixed(core, preempts=False, hits=family != "qwen3_next")

    return run


@pytest.mark.parametrize(
    ("family", "dtype", "shape", "overlap"),
    [
        ("llama", "float32", (2, 1), False),
        pytest.param("qwen3_next", "float32", (2, 1), None, marks=pytest.mark.slow),
        *pairwise(slow(LAYERS), ["float32", "bfloat16"], SHAPES, [False, None]),
    ],
)
def test_stages_give_the_bits_of_one_rank(pool, folder_of, on_one_rank, family, dtype, shape, overlap):
    config = staged(folder_of(family), *shape, dtype=dtype, determinism="strict", async_scheduling=overlap)
    with pool.engine(config) as core:
        outcome = run_mixed(core, preempts=False, hits=family != "qwen3_next")
    assert outcome.bits() == on_one_rank(family, dtype).bits()
    assert len({token for tokens in outcome.tokens.values() for token in tokens}) > 20, "output of few tokens"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "stages"), [*((family, 2) for family in LAYERS), ("llama", 4)])
def test_preempted_requests_give_the_same_bits(pool, folder_of, family, stages):
    outcomes = []
    for count in (1, stages):
        with pool.engine(staged(folder_of(family), count, num_gpu_blocks_override=20, determinism="strict")) as core:
            outcomes.append(run_mixed(core, hits=False))
    assert outcomes[1].bits() == outcomes[0].bits()


@pytest.mark.parametrize("family", with_slow(LAYERS, set(LAYERS) - {"llama"}))
def test_stages_give_the_same_tokens_with_padded_graphs_as_one_rank_plainly(pool, folder_of, monkeypatch, family):
    monkeypatch.setattr("tests.rank_pool.run_worker", run_late_worker)
    wanted, device = requests(logprobs=2), TapedDevice()
    expected = generate(folder_of(family), wanted, None)
    allow_graphs(monkeypatch, device)
    with pool.engine(small_config(folder_of(family), pipeline_parallel_size=2)) as core:
        found = answer(core, wanted)
    for name, (tokens, logprobs) in expected.items():
        assert found[name][0] == tokens
        assert [one.logprob for one in found[name][1]] == pytest.approx([one.logprob for one in logprobs], abs=1e-4)
    assert set(device.replays) >= {1, 2, 4, 20}, "and graphs of all sizes that a stage needs ran"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_graphs_of_stages_also_verify_drafts_and_pass_on_what_a_drafter_needs(pool, tmp_path, monkeypatch, method):
    monkeypatch.setattr("tests.rank_pool.run_worker", run_late_worker)
    draft_always(monkeypatch)
    (folder, options), wanted = make_drafters(tmp_path)[method], requests()
    expected = generate(folder, wanted, None)
    allow_graphs(monkeypatch, TapedDevice())
    speculative = SpeculativeConfig(**{**options, "num_speculative_tokens": 2})
    with pool.engine(small_config(folder, pipeline_parallel_size=2, speculative_config=speculative)) as core:
        found = answer(core, wanted)
        assert core.stats().record(SpecDecodeStats).num_draft_tokens > 0
    assert {name: tokens for name, (tokens, _) in found.items()} == {
        name: tokens for name, (tokens, _) in expected.items()
    }


def allow_graphs(patch: pytest.MonkeyPatch, device: TapedDevice) -> None:
    use_device(patch, device)
    patch.setattr("engine.runner.graphs.gpu_layers.can_capture", lambda setup: True)  # with latents too, as with Triton


def run_late_worker(config: EngineConfig, rank: int, address: str, options: dict[str, Any]) -> None:
    device = TapedDevice()
    with pytest.MonkeyPatch.context() as patch:
        allow_graphs(patch, device)
        run_worker(config, rank, address, options)
    if not set(device.replays) >= {1, 2, 4, 20}:
        raise EngineUnavailable(f"graphs of {set(device.replays)} rows ran")


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_hybrid_models_cached_state_is_found_in_every_stage(pool, folder_of, stages):
    outcomes, block_bytes = [], []
    for count in (1, stages):
        with pool.engine(staged(folder_of("qwen3_next"), count, determinism="strict")) as core:
            block_bytes.append(core.observers[CostLedger].block_bytes)
            prompt, outcome = random_prompt(core, 150, 5), Outcome()
            run(core, {"first": (prompt, {"logprobs": 1})}, outcome)
            assert not outcome.cached
            run(core, {"again": (prompt, {"logprobs": 1})}, outcome)
            assert outcome.cached >= 64
            outcomes.append(outcome)
    assert outcomes[1].bits() == outcomes[0].bits()
    assert outcomes[1].tokens["first"] == outcomes[1].tokens["again"]
    assert block_bytes[1] == block_bytes[0], "requests pay for the memory of all stages"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_first_stage_drops_the_token_of_a_request_that_ended_while_its_step_was_under_way(pool, folder_of, ranks):
    prompt = {"next": ([3, 4, 5], {})}
    with pool.engine(staged(folder_of("llama"), 1, ranks)) as core:
        expected = run(core, prompt, Outcome())
    with pool.engine(staged(folder_of("llama"), 2, ranks)) as core:
        core.add(GenerateRequest(request_id="ended", prompt=[7, 8], params=SamplingParams(max_tokens=40)))
        core.step()
        assert core.scheduler.planned
        core.abort("ended")
        assert run(core, prompt, Outcome()).bits() == expected.bits()


def test_an_engine_that_closes_with_steps_under_way_ends_its_ranks_without_an_error(pool, folder_of):
    with pool.engine(staged(folder_of("llama"), 2)) as core:
        for name in "abcd":
            core.add(GenerateRequest(request_id=name, prompt=[3, 4, 5], params=SamplingParams(max_tokens=40)))
        core.step()
        core.step()
        assert len(core.scheduler.planned) == 2


def see(core: EngineCore, name: str) -> dict[str, list[Any]]:
    """Tokens and log-probabilities of prompts with images, more than the encoder cache holds at a time."""
    found: dict[str, list[Any]] = {}
    for i in range(3):
        prompt = Prompt(name).text(5, 6 + i).image(11 + i).text(7, 8)
        prompt = prompt.image(21).text(*range(30, 50)).image(31 + i).text(9)
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
        request = GenerateRequest(request_id=str(i), prompt=prompt.tokens, params=params).asking(
            PromptImages.of(prompt.images)
        )
        core.add(request)
        found[str(i)] = []
    for delta in deltas_of(core):
        found[delta.request_id] += zip(delta.token_ids, delta.logprobs or [], strict=True)
    return found


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gemma3", (2, 1)),
        ("qwen3_vl", (2, 1)),
        pytest.param("qwen2_5_vl", (3, 1), marks=pytest.mark.slow),
        pytest.param("qwen3_vl", (2, 2), marks=pytest.mark.slow),
        pytest.param("qwen3_5", (4, 1), marks=pytest.mark.slow),
    ],
)
def test_images_that_the_first_stage_encodes_give_the_bits_of_one_rank(pool, tmp_path, name, shape):
    stages, ranks = shape
    folder = make_vision_model(tmp_path, name)
    layers = {"pipeline_layers": "2,1"} if name == "qwen3_vl" else {}  # the first two take a part of the images
    options = {"encoder_cache_size": 20, "max_num_batched_tokens": 24, "determinism": "strict"}
    outcomes = []
    for config in (staged(folder, 1, **options), staged(folder, stages, ranks, **options, **layers)):
        with pool.engine(config) as core:
            outcomes.append(see(core, name))
    assert outcomes[0] == outcomes[1]


def test_a_first_stage_without_the_layers_that_take_images_is_refused(tmp_path):
    folder = make_vision_model(tmp_path, "qwen3_vl")
    model = ModelConfig.from_folder(folder)
    with pytest.raises(ConfigError, match="pipeline_layers must be numbers of which the first is at least 2"):
        divide_layers(staged(folder, 3), model)


def test_an_engine_tells_how_long_each_stage_computed_and_waited(pool, folder_of):
    with pool.engine(staged(folder_of("llama"), 3, pipeline_layers="1,2,1")) as core:
        run(core, {"a": ([3, 4, 5], {})}, Outcome())
        stages = core.stats().record(StageReport).stages
    assert [(stage.layers, stage.ranks) for stage in stages] == [(1, 1), (2, 1), (1, 1)]
    assert all(stage.busy_s > 0 for stage in stages)
    assert all(stage.wait_s > 0 for stage in stages)  # one request is in one stage at a time


def kill_in_the_middle(pool: RankPool, config: EngineConfig, victim: int) -> None:
    with pool.engine(config) as core:
        for i in range(4):
            params = SamplingParams(max_tokens=40, ignore_eos=True)
            core.add(GenerateRequest(request_id=str(i), prompt=[3, 4, 5 + i], params=params))
        while core.stats().generation_tokens < 20:
            core.step()
        os.kill(pool.pids[victim - 1], signal.SIGKILL)
        while core.has_work:
            core.step()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 2])
def test_the_death_of_a_middle_or_last_stage_ends_the_engine_with_its_name(folder_of, victim):
    pool, config = RankPool(), staged(folder_of("llama"), 3, max_num_batched_tokens=64)
    try:
        with pytest.raises(EngineUnavailable, match=f"rank {victim} is gone"):
            kill_in_the_middle(pool, config, victim)
    finally:
        pool.kill()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"pipeline_parallel_size": 5},
            "pipeline_parallel_size must be at most the model's number of layers (4), got 5",
        ),
        (
            {"pipeline_parallel_size": 2, "pipeline_layers": "1,2"},
            "pipeline_layers must be 2 numbers of at least 1 whose sum",
        ),
        ({"pipeline_parallel_size": 2, "pipeline_layers": "4"}, "pipeline_layers must be 2 numbers"),
        (
            {"pipeline_parallel_size": 2, "torch_compile": True},
            "torch_compile must be left out, because pipeline_parallel_size",
        ),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be at least 1"),
    ],
)
def test_what_stages_do_not_support_is_refused_by_name_before_a_process_starts(folder_of, options, error):
    with pytest.raises(ConfigError) as raised:
        LLM(str(folder_of("llama")), device="cpu", **options)
    assert error in str(raised.value)


def test_layers_are_divided_so_that_the_costliest_stage_costs_least():
    assert divide([1.0] * 8, 2) == [4, 4]
    assert divide([1.0] * 10, 4) == [2, 2, 3, 3]
    assert divide([1.0] * 28, 4, last=9.0) == [9, 9, 9, 1]
    assert divide([1.0, 1.0, 4.0, 4.0], 2) == [3, 1]
    assert divide([1.0] * 3, 3, last=50.0) == [1, 1, 1]


def test_a_stage_holds_and_loads_only_its_own_layers(folder_of):
    folder = folder_of("llama")
    model = ModelConfig.from_folder(folder)
    whole = load(folder, model)
    parts = [load(folder, config_of(nth_stage(i, [1, 2, 1], model), model)) for i in range(3)]
    sizes = [sum(p.numel() for p in part.parameters()) for part in parts]
    norms = 2 * model.hidden_size  # of ones, in stages before the last
    assert sum(sizes) == sum(p.numel() for p in whole.parameters()) + norms
    held = [[i for i, layer in enumerate(part.layers) if next(layer.parameters(), None) is not None] for part in parts]
    assert held == [[0], [1, 2], [3]]
    assert [part.lm_head is None for part in parts] == [True, True, False]


def load(folder, model):
    built = build_model(model, ShardPlan(), torch.float32, "cpu")
    load_weights(built, folder, TPGroup.single())
    return built
