"""The whole engine with experts over ranks, each a process: the same bits as one rank with slices."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineUnavailable
from engine.offline.llm import LLM
from engine.options.speculation import SpeculativeConfig
from tests.engine.offline.test_pipeline_parallel import kill_in_the_middle
from tests.engine.offline.test_tensor_parallel import BUSY, Outcome, make_config, run_mixed
from tests.models import make_model
from tests.products import in_turns, pairwise, slow
from tests.rank_pool import RankPool

NGRAM = SpeculativeConfig(method="ngram")
OTHERS = ("mixtral", "gpt_oss", "glm4_moe", "gemma4_moe")
WAYS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 4},
    {"tensor_parallel_size": 2, "speculative_config": NGRAM},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
]


@pytest.fixture(scope="module")
def on_one_rank(pool, folder_of):
    """What one rank makes of the mixed requests."""

    @cache
    def run(family: str, dtype: str) -> Outcome:
        with pool.engine(
            spread(folder_of(family), dtype=dtype, tensor_parallel_size=1, enable_expert_parallel=False)
        ) as core:
            return run_mixed(core, preempts=False, hits=family != "qwen3_next")

    return run


def spread(folder: Path, **options: Any) -> EngineConfig:
    return make_config(
        folder, **{"size": 2, "determinism": "strict", "enable_expert_parallel": True, **BUSY, **options}
    )


@pytest.mark.parametrize(
    ("family", "dtype", "way"),
    pairwise(["qwen3_moe", *slow(["deepseek_v3"])], ["bfloat16", *slow(["float32"])], [WAYS[0], *slow(WAYS[1:])])
    + in_turns(slow(OTHERS), ["float32", "bfloat16"], WAYS[:3])
    + in_turns(slow(["qwen3_next"]), ["float32", "bfloat16"], WAYS[::2]),  # it has two heads to split
)
def test_ranks_with_whole_experts_give_the_bits_of_one_rank(pool, folder_of, on_one_rank, family, dtype, way):
    with pool.engine(spread(folder_of(family), dtype=dtype, num_gpu_blocks_override=30, **way)) as core:
        outcome = run_mixed(core, preempts=False, hits=family != "qwen3_next")
    assert outcome.bits() == on_one_rank(family, dtype).bits()


@pytest.mark.parametrize("determinism", [pytest.param("strict", marks=pytest.mark.slow), None])
def test_ranks_that_talk_through_gloo_give_the_tokens_of_one_rank(pool, folder_of, on_one_rank, determinism):
    config = spread(folder_of("qwen3_moe"), dtype="float32", determinism=determinism)
    with pool.engine(config, shared_memory=False) as core:
        assert run_mixed(core, preempts=False).tokens == on_one_rank("qwen3_moe", "float32").tokens


@pytest.mark.slow
def test_the_death_of_a_rank_ends_the_engine_with_its_name(folder_of):
    pool = RankPool()
    try:
        with pytest.raises(EngineUnavailable, match="rank 1 is gone"):
            kill_in_the_middle(pool, spread(folder_of("qwen3_moe"), num_gpu_blocks_override=64), 1)
    finally:
        pool.kill()


def test_more_ranks_than_experts_and_a_model_without_experts_are_refused_before_a_process_starts(folder_of, tmp_path):
    with pytest.raises(ConfigError, match="tensor_parallel_size must be at most the model's number of experts"):
        LLM(str(make_model(tmp_path / "few", "gpt_oss", num_local_experts=2, num_key_value_heads=4)),
            tensor_parallel_size=4, enable_expert_parallel=True, device="cpu")  # fmt: skip
    with pytest.raises(ConfigError, match="enable_expert_parallel must be left out"):
        LLM(
            str(make_model(tmp_path / "dense", "llama")),
            tensor_parallel_size=2,
            enable_expert_parallel=True,
            device="cpu",
        )
