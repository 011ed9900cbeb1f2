"""Engines that share experts, each a process: the bits of one engine that has all experts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from msgspec.structs import replace

from engine import SamplingParams
from engine.config import EngineConfig
from engine.devices.free_memory import FreeMemory
from engine.errors import ConfigError, EngineUnavailable, StartupError
from engine.offline.llm import LLM
from engine.options.speculation import SpeculativeConfig
from engine.parts.experts.rank.experts import ExpertLayers
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.experts import ExpertReport
from tests.answers import ask
from tests.engine.lora.peft_adapters import make_adapter
from tests.engine.offline.test_expert_moves import LATER, check_stop, check_streams, fail, often, run_streams
from tests.engine.offline.test_rank_processes import wait_until
from tests.engine.offline.test_tensor_parallel import BUSY, MAX_TOKENS, Outcome, make_config, random_prompt, run
from tests.models import make_model
from tests.products import in_turns, pairwise, slow
from tests.shared_engines import run_rank, running

NGRAM = SpeculativeConfig(method="ngram")
NAMES = {"one": 1, "two": 2}  # adapters and their seeds
FAMILIES = ("qwen3_moe", "deepseek_v3", "qwen3_next", "mixtral", "gpt_oss", "glm4_moe")
PREEMPTS = {("qwen3_moe", 2), ("deepseek_v3", 2)}
"""Families and numbers of engines for which the first engine has too few blocks for its requests."""
ALLTOALL = {"all2all_backend": "alltoall"}
WAYS: list[dict[str, Any]] = [{"speculative_config": NGRAM}, {"async_scheduling": True}]
KINDS = [("float32", "strict"), ("bfloat16", "strict"), ("float32", None)]


def shared(folder: Path, engines: int, **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "determinism": "strict",
        "enable_expert_parallel": engines > 1,
        "data_parallel_size": engines,
    }
    if engines == 2:
        defaults["num_gpu_blocks_override"] = 14  # too few for half of the requests
    return make_config(folder, 1, **{**BUSY, **defaults, **options})


def requests(engine: Any) -> list[dict[str, tuple[list[int], dict[str, Any]]]]:
    """Rounds of requests: many of every kind, then prefixes that are cached, then one request alone."""
    long, longer = random_prompt(engine, 33, 1), random_prompt(engine, 40, 2)
    random = {"temperature": 1.0, "seed": 7}
    many = {
        "greedy": (long, {}),
        "greedy too": (longer, {}),
        "random": (long[:9], random),
        "filtered": (longer[:5], {**random, "top_p": 0.8, "min_p": 0.02}),
        "few": (long[:20], {**random, "top_k": 5}),
        "edited": (longer[:17], {"repetition_penalty": 1.5, "min_tokens": 5}),
        "with logprobs": (long[3:30], {"logprobs": 3, "prompt_logprobs": 2}),
        "repeats": ([5, 6, 7] * 8, {"logprobs": 0}),
    }
    again = {"again": (long, {}), "goes on": (longer[:30] + long[:3], random)}
    return [many, again, {"alone": (longer[:11], {"logprobs": 2})}]


def run_rounds(engine: Any) -> Outcome:
    outcome = Outcome()
    for some in requests(engine):
        run(engine, some, outcome)  # after each round, all engines are idle
    return outcome


@pytest.fixture(scope="module")
def on_one_engine(pool, folder_of):
    @cache
    def outcome(family: str, dtype: str) -> Outcome:
        with pool.engine(shared(folder_of(family), 1, dtype=dtype)) as core:
            return run_rounds(core)

    return outcome


@pytest.mark.parametrize(
    ("family", "dtype", "engines", "options"),
    pairwise(["qwen3_moe", *slow(FAMILIES[1:])], ["bfloat16", *slow(["float32"])], [2, *slow([4])], [{}])
    + pairwise(slow(["qwen3_moe", "qwen3_next"]), ["bfloat16", "float32"], [2], WAYS)
    + pairwise(slow(["qwen3_moe"]), ["bfloat16", "float32"], [2, 4], [ALLTOALL]),
)
def test_engines_that_share_experts_give_the_bits_of_one(
    pool, folder_of, on_one_engine, family, dtype, engines, options
):
    with running(pool, shared(folder_of(family), engines, dtype=dtype, **options)) as group:
        outcome = run_rounds(group)
        stats = group.group.all_stats()
    assert outcome.bits() == on_one_engine(family, dtype).bits()
    assert len(set(outcome.tokens["greedy"])) > 2, "output that repeats one token would prove nothing"
    assert outcome.cached > 0 or family == "qwen3_next"
    assert outcome.stats is not None and (outcome.stats.preemptions > 0 or (family, engines) not in PREEMPTS)
    assert stats[0].generation_tokens < sum(map(len, outcome.tokens.values())), "other engines answered too"


def test_a_request_alone_is_computed_by_one_engine_and_served_by_the_other(pool, folder_of):
    with running(pool, shared(folder_of("qwen3_moe"), 2)) as group:
        for i in range(3):
            run(group, {f"{i}": ([5, 6, 7 + i], {})}, Outcome())  # type: ignore[arg-type]
        assert group.stats().generation_tokens == 3 * MAX_TOKENS
        wait_until(lambda: len(group.group.all_stats()) == 2)
        assert group.group.all_stats()[1].steps == 0, "it serves without steps of its own"


@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [
        ("qwen3_moe", ("bfloat16", "strict"), {}),
        *in_turns(slow(FAMILIES), KINDS, [{}]),
        *pairwise(slow(["qwen3_moe", "qwen3_next"]), KINDS, [*WAYS, ALLTOALL]),
    ],
)
def test_engines_of_two_ranks_give_the_tokens_of_one_rank_and_with_strict_its_bits(
    pool, folder_of, on_one_engine, family, kind, options
):
    dtype, determinism = kind
    config = shared(folder_of(family), 2, tensor_parallel_size=2, dtype=dtype, determinism=determinism, **options)
    with running(pool, config) as group:
        outcome = run_rounds(group)
        stats = group.group.all_stats()
    expected = on_one_engine(family, dtype)
    assert outcome.tokens == expected.tokens
    assert outcome.bits() == expected.bits() or determinism is None
    assert stats[0].generation_tokens < sum(map(len, outcome.tokens.values())), "the other engine answered too"


STAGED: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"dtype": "bfloat16"}),
    ("qwen3_moe", {"dtype": "float32"}),
    ("qwen3_moe", {"dtype": "float32", "determinism": None}),
    ("qwen3_moe", {"dtype": "float32", "speculative_config": NGRAM}),
    ("qwen3_moe", {"dtype": "float32", "async_scheduling": False}),
    ("qwen3_moe", {"dtype": "float32", "tensor_parallel_size": 2, "all2all_backend": "alltoall"}),
    ("qwen3_moe", {"dtype": "float32", "pipeline_parallel_size": 3}),
    ("deepseek_v3", {"dtype": "bfloat16"}),
    ("qwen3_next", {"dtype": "bfloat16"}),
    ("gpt_oss", {"dtype": "float32"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "options"), STAGED)
def test_engines_with_stages_that_share_experts_give_the_tokens_of_one_rank_and_with_strict_its_bits(
    pool, folder_of, on_one_engine, family, options
):
    with running(pool, shared(folder_of(family), 2, **{"pipeline_parallel_size": 2, **options})) as group:
        outcome = run_rounds(group)
        stats = group.group.all_stats()
    expected = on_one_engine(family, options["dtype"])
    assert outcome.tokens == expected.tokens
    assert outcome.bits() == expected.bits() or options.get("determinism", "strict") is None
    assert stats[0].generation_tokens < sum(map(len, outcome.tokens.values())), "the other engine answered too"


@pytest.mark.slow
@pytest.mark.parametrize("determinism", [None, "strict"])
@pytest.mark.parametrize("options", [{}, ALLTOALL])
def test_engines_that_talk_through_gloo_give_the_tokens_of_one(pool, folder_of, on_one_engine, determinism, options):
    config = shared(folder_of("qwen3_moe"), 2, determinism=determinism, **options)
    with running(pool, config, shared_memory=False) as group:
        assert run_rounds(group).tokens == on_one_engine("qwen3_moe", "float32").tokens


@pytest.mark.parametrize(
    ("ranks", "determinism", "backend"),
    [
        pytest.param(*case, marks=() if case == (1, None, "alltoall") else pytest.mark.slow)
        for case in product((1, 2), ("strict", None), ("auto", "alltoall"))
    ],
)
def test_experts_move_between_the_ranks_of_all_engines_in_the_middle_of_streams(
    pool, tmp_path, ranks, determinism, backend
):
    folder = make_model(tmp_path, "qwen3_moe", num_experts_per_tok=3)  # two summands have only one order
    options = {"determinism": determinism, "num_gpu_blocks_override": 300, "enable_eplb": True,
               "tensor_parallel_size": ranks,
               "all2all_backend": backend}  # fmt: skip
    if determinism is None:  # the bits of engines whose experts have not moved
        with running(pool, shared(folder, 2, eplb_config=LATER, **options)) as group:
            expected = run_streams(group)
            assert not group.stats().record(ExpertReport).stages
    else:
        with pool.engine(shared(folder, 1, num_gpu_blocks_override=300)) as core:
            expected = run_streams(core)
    with running(pool, shared(folder, 2, eplb_config=often(6, 2 * ranks), **options)) as group:
        check_streams(group, expected.bits())
        (load,) = group.stats().record(ExpertReport).stages
        assert len(load.rank_tokens) == 2 * ranks and all(load.rank_tokens)
        wait_until(lambda: len(group.group.all_stats()) == 2)
        assert not group.group.all_stats()[1].record(ExpertReport).stages, "one engine reports for all"


@pytest.mark.slow
def test_when_a_rank_cannot_move_experts_all_engines_keep_theirs_and_go_on(pool, folder_of, monkeypatch):
    with pool.engine(shared(folder_of("qwen3_moe"), 1, num_gpu_blocks_override=300)) as core:
        expected = run_streams(core).bits()
    options = {"num_gpu_blocks_override": 300, "enable_eplb": True, "eplb_config": often()}
    with running(pool, shared(folder_of("qwen3_moe"), 2, **options)) as group:
        monkeypatch.setattr(group.core.ranks.runner.parts[ExpertLayers].rank, "_exchange", fail)
        check_stop(group, expected)


def test_each_engine_computes_requests_with_adapters_of_attention(pool, folder_of, tmp_path):
    folder = folder_of("qwen3_moe")
    adapters = [make_adapter(tmp_path / name, folder, seed) for name, seed in NAMES.items()]
    requests = {f"{i}": ([5, 6, 7 + i], [*adapters, None][i % 3]) for i in range(9)}
    with pool.engine(shared(folder, 1, enable_lora=True)) as core:
        alone = ask(core, requests)
    assert len({tuple(alone.tokens[name]) for name in "036"}) > 1 and not alone.errors
    with running(pool, shared(folder, 2, enable_lora=True)) as group:
        answers = ask(group, requests)
        assert (answers.tokens, answers.logprobs, answers.errors) == (alone.tokens, alone.logprobs, {})
        assert group.stats().generation_tokens < sum(map(len, alone.tokens.values())), "the other engine answered too"
        experts = make_adapter(tmp_path / "experts", folder, 3, target_parameters=["mlp.experts.down_proj"])
        refused = ask(group, {"experts": ([5, 6], experts)})
        assert (
            "with data_parallel_size, experts also compute tokens of engines that have other"
            in refused.errors["experts"]
        )


@contextmanager
def traced() -> Iterator[None]:
    """Trace layers as for Inductor, and run them by torch's own operations, which needs no C++ compiler."""
    compiled = partial(torch.compile, backend="aot_eager")
    with mock.patch("engine.runner.graphs.torch_compile.torch.compile", compiled):
        yield
    torch._dynamo.reset()


def run_traced(*args: Any) -> None:
    with traced():
        run_rank(*args)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_whose_layers_are_compiled_give_the_tokens_of_one_that_is_not(
    pool, folder_of, on_one_engine, ranks, monkeypatch
):
    monkeypatch.setattr("tests.shared_engines.run_rank", run_traced)
    config = shared(folder_of("qwen3_moe"), 2, determinism=None, torch_compile=True, tensor_parallel_size=ranks)
    with traced(), running(pool, config) as group:
        assert run_rounds(group).tokens == on_one_engine("qwen3_moe", "float32").tokens


def run_with_little_memory(*args: Any) -> None:
    with mock.patch("engine.devices.host_memory.free_host_memory", return_value=FreeMemory(2**20, "")):
        run_rank(*args)


def test_all_engines_have_the_blocks_of_the_one_with_the_least_memory(pool, folder_of, monkeypatch):
    options: dict[str, Any] = {"num_gpu_blocks_override": None}
    with pool.engine(shared(folder_of("qwen3_moe"), 1, **options)) as core:
        most = core.scheduler.kv_cache.groups[0].pool.num_blocks
    monkeypatch.setattr("tests.shared_engines.run_rank", run_with_little_memory)
    with running(pool, shared(folder_of("qwen3_moe"), 2, **options)) as group:
        assert group.scheduler.kv_cache.groups[0].pool.num_blocks < most


def test_aborted_requests_end_in_every_engine_and_the_others_go_on(pool, folder_of, on_one_engine):
    with running(pool, shared(folder_of("qwen3_moe"), 2)) as group:
        for i in range(4):
            params = SamplingParams(max_tokens=200, ignore_eos=True)
            group.add(GenerateRequest(request_id=f"endless {i}", prompt=[3, 4, 5 + i], params=params))
        seen: set[str] = set()
        while len(seen) < 4:
            seen |= {event.delta.request_id for event in group.step()}
        for i in range(4):
            group.group.abort(f"endless {i}")
        assert not group.has_work
        assert run_rounds(group).bits() == on_one_engine("qwen3_moe", "float32").bits()


def test_an_id_can_be_used_again_while_an_engine_still_answers_the_aborted_request(pool, folder_of):
    with running(pool, shared(folder_of("qwen3_moe"), 2)) as group:
        for name in ("first engine", "again"):
            params = SamplingParams(max_tokens=200, ignore_eos=True)
            group.add(GenerateRequest(request_id=name, prompt=[3, 4, 5], params=params))
        while not any(event.delta.request_id == "again" for event in group.step()):
            pass
        for length in (3, 4):
            group.group.abort("again", "stop")
            params = SamplingParams(max_tokens=length, ignore_eos=True)
            group.add(GenerateRequest(request_id="again", prompt=[3, 4, 5], params=params))
        found = []
        while "again" in group.group._live:
            found += [event.delta for event in group.step() if event.delta.request_id == "again"]
        assert [delta.position for delta in found if delta.token_ids] == [0, 1, 2, 3]
        assert found[-1].finish_reason == "length"
        group.group.abort("first engine")


@pytest.mark.slow
def test_the_death_of_an_engine_ends_the_group_with_an_error_and_a_new_group_replays_to_the_same_text(tmp_path):
    folder = str(make_model(tmp_path, "qwen3_moe", tokenizer=True))
    options = {"dtype": "float32", "determinism": "strict", "num_threads": 1, "device": "cpu", "block_size": 4,
               "max_num_seqs": 8, "num_gpu_blocks_override": 256}  # fmt: skip
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    prompts = [[5, 6, 7 + i] for i in range(16)]
    with LLM(folder, **options) as alone:
        expected = [request.outputs[0].token_ids for request in alone.generate(prompts, params, use_tqdm=False)]
    with LLM(folder, data_parallel_size=4, enable_expert_parallel=True, **options) as llm:
        assert llm._ranks is not None
        victim = llm._ranks.processes[1]
        lengths = [params if i else replace(params, max_tokens=5) for i in range(len(prompts))]  # one ends first
        jobs = [(llm.request(prompt, p), p) for prompt, p in zip(prompts, lengths, strict=True)]
        done = llm.run(jobs, use_tqdm=False)
        next(done)
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailable, match=r"rank \d"):
            list(done)
    with LLM(folder, data_parallel_size=4, enable_expert_parallel=True, **options) as again:
        found = [request.outputs[0].token_ids for request in again.generate(prompts, params, use_tqdm=False)]
    assert found == expected


def test_what_engines_cannot_share_is_refused_before_a_process_starts(folder_of, tmp_path):
    with pytest.raises(ConfigError, match="data_parallel_size must be 1 for LlamaForCausalLM, which has no experts"):
        LLM(str(make_model(tmp_path, "llama")), data_parallel_size=2, enable_expert_parallel=True, device="cpu")
    with pytest.raises(StartupError, match="data_parallel_size must be at most the model's number of experts"):
        LLM(str(folder_of("qwen3_moe")), data_parallel_size=64, enable_expert_parallel=True, device="cpu")
