"""The whole engine over two and four ranks, each a process: the same tokens as over one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.pooling import PoolingParams
from engine.wire.sampling_params import SamplingParams
from engine.wire.stats.engine_stats import EngineStats
from engine.wire.token_delta import TokenLogprob
from tests.deltas import deltas_of
from tests.models import FAMILIES, make_model, with_slow
from tests.products import each_once, few, in_turns, pairwise, slow
from tests.rank_pool import RankPool, check_imports

MAX_TOKENS = 12
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1}),
    "llama_fewer_tokens_than_ranks_hold": ("llama", {"vocab_size": 9}),  # 3 + 3 + 3 + 0
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
}
VARIANTS = {family: (family, {}) for family in FAMILIES} | ODD  # 2 KV heads, 97 tokens: neither suits four ranks
VARIANTS["minicpm3"] = ("minicpm3", {"seed": 1})  # with the other weights it repeats two tokens
POOLED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_bidirectional": ("gemma3", {"use_bidirectional_attention": True})
}
OTHERS = tuple(family for family in FAMILIES if family not in ("qwen3_moe", "deepseek_v3"))
"""Their layers are compared on both numbers of ranks in model/models/test_tensor_parallel.py: engines are slow."""
LIKE_OTHERS = [variant for variant in VARIANTS if variant not in ("llama", "qwen3_moe", "gemma3", "deepseek_v3")]
BUSY = {
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 26,
    "max_num_batched_tokens": 20,
}  # preempts, and cuts prompts into chunks


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @cache
    def make(variant: str) -> Path:
        family, overrides = {**VARIANTS, **POOLED}[variant]
        return make_model(tmp_path_factory.mktemp(variant), family, **overrides)

    return make


@pytest.fixture(scope="module")
def on_one_rank(pool, folder_of):
    """What one rank makes of the mixed requests, per variant."""

    @cache
    def run(variant: str) -> Outcome:
        with pool.engine(make_config(folder_of(variant), 1, **BUSY)) as core:
            return run_mixed(core)

    return run


def make_config(folder: Path, size: int, **options: Any) -> EngineConfig:
    defaults = {
        "dtype": "float32",
        "block_size": 4,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 128,
        "num_threads": 1,
    }
    return EngineConfig(**{"model": str(folder), "tensor_parallel_size": size, **defaults, **options})


class Outcome:
    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprob]] = {}
        self.cached = 0
        self.stats: EngineStats | None = None

    def bits(self) -> dict[str, Any]:
        """Tokens, and the log-probabilities as they are, bit for bit."""
        kinds = ("", self.tokens), ("logprobs", self.logprobs), ("prompt logprobs", self.prompt_logprobs)
        return {f"{kind} {name}": value for kind, values in kinds for name, value in values.items()}


def run(core: EngineCore, requests: dict[str, tuple[list[int], dict[str, Any]]], outcome: Outcome) -> Outcome:
    for name, (prompt, params) in requests.items():
        settings = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **params}
        core.add(GenerateRequest(request_id=name, prompt=prompt, params=SamplingParams(**settings)))
        outcome.tokens[name], outcome.logprobs[name] = [], []
    for delta in deltas_of(core):
        name = delta.request_id
        outcome.tokens[name] += delta.token_ids
        outcome.logprobs[name] += delta.logprobs or []
        outcome.cached += delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            outcome.prompt_logprobs[name] = delta.prompt_logprobs[1:]
    outcome.stats = core.stats()
    return outcome


def random_prompt(core: EngineCore, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, core.model_config.vocab_size, (length,), generator=generator).tolist()


def run_mixed(core: EngineCore, preempts: bool = True, hits: bool = True) -> Outcome:
    """Run some requests of every kind, more than fit at a time; then some whose prefix is cached. preempts: whether
    they must preempt each other. hits: whether the cache must find the prefixes."""
    long, longer = random_prompt(core, 33, 1), random_prompt(core, 40, 2)
    random = {"temperature": 1.0, "seed": 7}
    outcome = run(
        core,
        {
            "greedy": (long, {}),
            "greedy too": (longer, {}),
            "random": (long[:9], random),
            "filtered": (longer[:5], {**random, "top_p": 0.8, "min_p": 0.02}),
            "few": (long[:20], {**random, "top_k": 5}),
            "edited": (longer[:17], {"repetition_penalty": 1.5, "min_tokens": 5}),
            "with logprobs": (long[3:30], {"logprobs": 3, "prompt_logprobs": 2}),
        },
        Outcome(),
    )
    whole = core.model_config.kv_groups[0].spec.window is None  # windows alone fit next to each other
    assert outcome.stats is not None and (outcome.stats.preemptions > 0 or not (whole and preempts))
    again = {"again": (long, {}), "goes on": (longer[:30] + long[:3], random)}
    cached = outcome.cached
    run(core, again, outcome)
    assert outcome.cached > cached or not hits
    return outcome


@pytest.mark.parametrize(
    ("variant", "size", "overlap"),
    few(1, each_once(["qwen3_moe", "deepseek_v3"], [2, 4], [True, False]))
    + in_turns(slow(OTHERS), [2, 4], [True, False])
    + each_once(with_slow(ODD, ["llama_one_kv_head", "llama_biases"]), [2, 4], [True, False]),
)
def test_ranks_give_the_tokens_of_one_rank_with_preemption_and_cached_prefixes(
    pool, folder_of, on_one_rank, variant, size, overlap
):
    expected = on_one_rank(variant)
    with pool.engine(make_config(folder_of(variant), size, async_scheduling=overlap, **BUSY)) as core:
        outcome = run_mixed(core)
    assert outcome.tokens == expected.tokens
    assert len(set(outcome.tokens["greedy"])) > 2, "output that repeats one token would prove nothing"
    check_logprobs(outcome.logprobs["with logprobs"], expected.logprobs["with logprobs"])
    check_logprobs(outcome.prompt_logprobs["with logprobs"], expected.prompt_logprobs["with logprobs"])


def test_the_process_of_a_rank_has_what_its_first_engine_imports():
    """Else each of them takes seconds for that (tests/started_engine.py)."""
    with RankPool() as fresh:
        fresh.call(1, check_imports)
        fresh.answer(1)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_talk_through_gloo_give_the_tokens_of_one_rank(pool, folder_of, on_one_rank, size):
    with pool.engine(make_config(folder_of("qwen3_moe"), size, **BUSY), shared_memory=False) as core:
        assert run_mixed(core).tokens == on_one_rank("qwen3_moe").tokens


@pytest.mark.parametrize(
    ("variant", "dtype"),
    pairwise(["llama", *slow(["qwen3_moe", "gemma3", "deepseek_v3"])], ["float32", *slow(["bfloat16"])])
    + in_turns(slow(LIKE_OTHERS), ["float32", "bfloat16"]),
)
def test_with_strict_determinism_any_number_of_ranks_gives_the_same_bits(pool, folder_of, variant, dtype):
    outcomes = []
    for size in (1, 2, 4):
        options = {**BUSY, "max_num_batched_tokens": 8 + 12 * size}  # other chunks for each number of ranks
        with pool.engine(make_config(folder_of(variant), size, dtype=dtype, determinism="strict", **options)) as core:
            outcomes.append(run_mixed(core))
    first, *others = (outcome.bits() for outcome in outcomes)
    assert len(first) > 8
    for other in others:
        assert other == first


def test_without_it_the_bits_depend_on_the_number_of_ranks(pool, folder_of, on_one_rank):
    with pool.engine(make_config(folder_of("llama"), 2, **BUSY)) as core:
        assert run_mixed(core).bits() != on_one_rank("llama").bits()


def test_greedy_tokens_are_the_same_whether_all_logits_are_gathered_or_only_the_largest(pool, folder_of):
    with pool.engine(make_config(folder_of("llama"), 4)) as core:
        prompts = {str(n): random_prompt(core, n, seed=n) for n in (1, 8, 30)}
        least = run(core, {name: (prompt, {}) for name, prompt in prompts.items()}, Outcome())
        every = run(core, {name: (prompt, {"logprobs": 0}) for name, prompt in prompts.items()}, Outcome())
    assert all(every.logprobs.values()) and not any(least.logprobs.values())
    assert least.tokens == every.tokens


@pytest.mark.slow
def test_two_engines_over_several_ranks_share_a_process(pool, folder_of):
    config = make_config(folder_of("llama"), 2)
    with RankPool() as other, pool.engine(config) as a, other.engine(config) as b:
        for core in (a, b):
            run(core, {"warm": ([3, 4, 5], {})}, Outcome())
        requests = {str(n): (random_prompt(a, n, seed=n), {}) for n in (5, 20)}
        assert run(a, requests, Outcome()).tokens == run(b, requests, Outcome()).tokens


def check_logprobs(entries: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    assert entries
    assert [entry.token_id for entry in entries] == [entry.token_id for entry in expected]
    near = {"atol": 1e-4, "rtol": 0}
    for entry, right in zip(entries, expected, strict=True):
        torch.testing.assert_close(entry.logprob, right.logprob, **near)
        torch.testing.assert_close([v for _, v in entry.top], [v for _, v in right.top], **near)


@pytest.mark.parametrize("variant", ["qwen3", "gemma3_bidirectional"])
def test_two_ranks_pool_like_one(pool, folder_of, variant):
    vectors = []
    for size in (1, 2):
        with pool.engine(make_config(folder_of(variant), size, max_num_batched_tokens=20)) as core:
            for length in (5, 33, 12):
                prompt = random_prompt(core, length, seed=length)
                core.add(GenerateRequest(request_id=str(length), prompt=prompt).asking(PoolingParams()))
            pooled: dict[str, bytes] = {}
            while core.has_work:
                pooled |= {event.delta.request_id: event.delta.answer for event in core.step()}
            vectors.append(np.stack([np.frombuffer(pooled[name], dtype="<f4") for name in sorted(pooled)]))
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-5)
