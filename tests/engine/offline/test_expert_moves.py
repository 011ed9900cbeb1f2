"""Experts that move between ranks, each a process, while requests run: the bits stay those of one rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.errors import ConfigError, EngineUnavailable
from engine.options.experts import EPLBConfig
from engine.parts.experts.rank.experts import ExpertLayers
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.experts import ExpertReport, ExpertStats
from engine.wire.sampling_params import SamplingParams
from tests.engine.model.quantization.checkpoints import FORMATS, quantize_folder
from tests.engine.offline.test_pipeline_parallel import kill_in_the_middle
from tests.engine.offline.test_tensor_parallel import Outcome, make_config, run
from tests.models import make_model
from tests.rank_pool import RankPool

EXPERTS = {"qwen3_moe": 6, "deepseek_v3": 8, "gpt_oss": 4, "qwen3_next": 6}
STREAMS, TOKENS = 8, 40
DEADLINE_S = 120.0  # by which a failing test ends


def often(experts: int = 6, size: int = 2, **options: Any) -> EPLBConfig:
    """Windows of two steps, and at least one redundant expert per rank."""
    redundant = -experts % size + size
    return EPLBConfig(**{"window_size": 2, "step_interval": 2, "num_redundant_experts": redundant, **options})


LATER = often(window_size=10_000, step_interval=10_000)  # than any request here ends


def moving(folder: Path, size: int, **options: Any) -> EngineConfig:
    eplb = {"enable_eplb": True, "eplb_config": often(size=size), "enable_expert_parallel": True} if size > 1 else {}
    return make_config(
        folder, size, **{**eplb, "num_gpu_blocks_override": 300, "max_num_batched_tokens": 40, **options}
    )


def run_streams(core: EngineCore) -> Outcome:
    """Run streams with prompts of many lengths, so that chunks, decoding and, with other streams, all sizes of batches
    occur while experts move."""
    requests = {}
    for i in range(STREAMS):
        generator = torch.Generator().manual_seed(i)
        prompt = torch.randint(3, core.model_config.vocab_size, (3 + 9 * i,), generator=generator).tolist()
        random = {} if i % 2 else {"temperature": 1.0, "seed": i}
        requests[str(i)] = prompt, {"max_tokens": TOKENS - 3 * i, "logprobs": 2, **random}
    return run(core, requests, Outcome())


def check_streams(core: EngineCore, expected: dict[str, Any]) -> None:
    """Run the streams until experts have moved, and once more with the experts where they are then."""
    deadline = time.monotonic() + DEADLINE_S
    while not moved(core):
        assert time.monotonic() < deadline, "no expert has moved"
        assert run_streams(core).bits() == expected
    assert run_streams(core).bits() == expected


def check_stop(core: EngineCore, expected: dict[str, Any]) -> None:
    """Run the streams until experts have stopped moving, since a rank cannot move them, and once more."""
    deadline = time.monotonic() + DEADLINE_S
    while not any(stage.stopped for stage in loads(core)):
        assert time.monotonic() < deadline, "experts have not stopped"
        assert run_streams(core).bits() == expected
    assert run_streams(core).bits() == expected
    assert moved(core) == 0


def step_until(core: EngineCore, condition: Callable[[], object]) -> None:
    """Compute steps of one token each until a condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        run(core, {"more": ([3], {"max_tokens": 1})}, Outcome())


def loads(core: EngineCore) -> list[ExpertStats]:
    report = core.stats().record(ExpertReport)
    return [] if report is None else report.stages


def moved(core: EngineCore) -> int:
    return sum(stage.moved for stage in loads(core))


def slow_unless(fast: bool) -> Any:
    return () if fast else pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "dtype", "size"),
    [
        pytest.param(family, dtype, size, marks=slow_unless((family, dtype, size) in FAST))
        for FAST in [{("qwen3_moe", "bfloat16", 2)}]
        for family in EXPERTS
        for dtype in ("bfloat16", "float32")
        for size in (2, 4)
        if (family, size) != ("qwen3_next", 4)  # it has two heads to split
    ],
)
def test_experts_that_move_in_the_middle_of_streams_leave_the_bits_of_one_rank(pool, folder_of, family, dtype, size):
    options = {"dtype": dtype, "determinism": "strict"}
    with pool.engine(moving(folder_of(family), 1, **options)) as core:
        expected = run_streams(core).bits()
    eplb = often(EXPERTS[family], size)
    with pool.engine(moving(folder_of(family), size, eplb_config=eplb, **options)) as core:
        check_streams(core, expected)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_without_a_fixed_order_bits_do_not_depend_on_where_experts_are(pool, tmp_path, stages):
    folder = make_model(tmp_path, "qwen3_moe", num_experts_per_tok=3)  # two summands have only one order
    options = {"dtype": "float32", "pipeline_parallel_size": stages}
    with pool.engine(moving(folder, 2, eplb_config=LATER, **options)) as core:
        expected = run_streams(core)
        assert not loads(core)
    with pool.engine(moving(folder, 2, **options)) as core:
        check_streams(core, expected.bits())
        assert len(loads(core)) == stages


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ct_int8", "awq"])
def test_quantized_experts_move(pool, tmp_path, name):
    shape = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64}
    source = make_model(tmp_path / "source", "qwen3_moe", **shape)
    quantize_folder(source, tmp_path / "model", tmp_path / "twin", *FORMATS[name])
    for config in (LATER, often()):
        with pool.engine(moving(tmp_path / "model", 2, eplb_config=config)) as core:
            if config is LATER:
                expected = run_streams(core).bits()
            else:
                check_streams(core, expected)


def test_the_tokens_of_each_expert_are_counted_without_those_of_warm_up_steps(pool, folder_of):
    config = moving(folder_of("qwen3_moe"), 2, enable_eplb=False, eplb_config=often(window_size=4, step_interval=4))
    with pool.engine(config) as core:
        run(core, {"a": ([3, 4, 5, 6, 7, 8], {"max_tokens": 4})}, Outcome())  # 6, 1, 1 and 1 tokens: one window
        run(core, {"b": ([3], {"max_tokens": 2})}, Outcome())
        step_until(core, lambda: loads(core))
        (stats,) = loads(core)
        moe = core.model_config.moe
        pairs = moe.experts_per_token * len(moe.layers)
        assert sum(stats.rank_tokens) == 9 * pairs
        step_until(core, lambda: sum(loads(core)[0].rank_tokens) > 9 * pairs)
        total = sum(loads(core)[0].rank_tokens)
        assert (total - 9 * pairs) % (4 * pairs) == 0  # further windows have four steps of one token each
        assert 0.5 <= stats.balancedness <= 1
        assert stats.moved == 0
        layer, expert, share = stats.top[0]
        assert layer in moe.layers and expert < moe.num_experts and 0 < share <= 1


def test_a_window_is_logged_if_asked_for(pool, folder_of, caplog):
    caplog.set_level(logging.INFO, "engine.eplb.rank_experts")
    config = often(step_interval=1000, log_balancedness=True)
    with pool.engine(moving(folder_of("qwen3_moe"), 2, eplb_config=config)) as core:
        run_streams(core)
    assert "balancedness=" in caplog.text


def fail(*_: Any) -> None:
    raise RuntimeError("no room")


def test_when_a_rank_cannot_move_experts_all_keep_theirs_and_the_engine_goes_on(pool, folder_of, monkeypatch):
    options = {"dtype": "float32", "determinism": "strict"}
    with pool.engine(moving(folder_of("qwen3_moe"), 1, **options)) as core:
        expected = run_streams(core).bits()
    with pool.engine(moving(folder_of("qwen3_moe"), 2, **options)) as core:
        monkeypatch.setattr(core.ranks.runner.parts[ExpertLayers].rank, "_exchange", fail)
        check_stop(core, expected)


@pytest.mark.slow
def test_a_rank_that_dies_while_experts_move_ends_the_engine_with_its_name(folder_of):
    pool = RankPool()
    try:
        with pytest.raises(EngineUnavailable, match="rank 1 is gone"):
            kill_in_the_middle(pool, moving(folder_of("qwen3_moe"), 2), 1)
    finally:
        pool.kill()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"enable_expert_parallel": False},
            "enable_eplb must be false without enable_expert_parallel on at least two ranks",
        ),
        ({"tensor_parallel_size": 1}, "enable_eplb must be false without enable_expert_parallel on at least two ranks"),
        ({"enable_lora": True}, "enable_eplb must be false with enable_lora"),
        (
            {"eplb_config": {"step_interval": 3}},
            r"eplb_config.step_interval must be at least 1000 \(window_size\), got 3",
        ),
        ({"eplb_config": {"num_redundant_experts": -1}}, "eplb_config.num_redundant_experts must be at least 0"),
        (
            {"eplb_config": {"use_async": True}},
            "eplb_config.use_async must be left out; the known keys are window_size",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options, error):
    with pytest.raises(ConfigError, match=error):
        EngineConfig(**{"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True, **options})


def test_requests_are_answered_while_experts_wait_to_move(pool, folder_of):
    """Moves need steps to take effect. They wait for the next request, and the engine can be closed meanwhile."""
    with pool.engine(moving(folder_of("qwen3_moe"), 2)) as core:
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        for i in range(3):
            core.add(GenerateRequest(request_id=str(i), prompt=[3, 4], params=params))
            while core.has_work:
                core.step()
