"""Engines that share experts and go on when some of them are killed: no text changes."""

from __future__ import annotations

import os
import signal
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from engine import SamplingParams
from engine.config import EngineConfig
from engine.devices.free_memory import FreeMemory
from engine.errors import ConfigError, EngineUnavailable
from engine.offline.engine_group import EngineGroup
from engine.offline.llm import LLM
from engine.parts.experts.rank.experts import ExpertLayers
from engine.wire.parts.costs import CostStats
from engine.wire.parts.experts import ExpertReport, SharedSteps
from engine.wire.parts.speculation import SpecDecodeStats
from tests.engine.offline.test_rank_processes import wait_until
from tests.engine.spec_decode.draft_checkpoints import (
    DRAFT_VOCAB,
    PlainEagle3,
    copy_with_noise,
    write_authors,
    write_mtp,
)
from tests.models import make_model

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_threads": 1, "device": "cpu", "block_size": 4, "max_num_seqs": 8,
    "num_gpu_blocks_override": 256,
}  # fmt: skip
RANDOM = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True, logprobs=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
PROMPTS = [[5, 6, 7 + i, *range(9, 9 + 3 * i)] for i in range(12)]

CASES: dict[str, dict[str, Any]] = {
    "strict": {},
    "float32": {"determinism": None},
    "recurrent": {"family": "qwen3_next"},
    "latent": {"family": "deepseek_v3"},
    "windowed": {"family": "gpt_oss"},
    "overlap": {"async_scheduling": True},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "preemption": {"num_gpu_blocks_override": 30},
    "gloo": {"disable_custom_all_reduce": True},
    "bfloat16": {"dtype": "bfloat16"},
    "compiled": {"determinism": None},
    "ranks": {},
    "copies": {},
}
LAYOUTS: dict[str, dict[str, Any]] = {  # which change no text
    "compiled": {"torch_compile": True},
    "ranks": {"tensor_parallel_size": 2},
    "copies": {"enable_eplb": True, "eplb_config": {"num_redundant_experts": 3, "window_size": 4, "step_interval": 8}},
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @cache
    def make(family: str) -> str:
        return str(make_model(tmp_path_factory.mktemp(family), family, tokenizer=True))

    return make


def answers(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [request.outputs[0].token_ids for request in llm.generate(PROMPTS, params, use_tqdm=False)]


def group_of(llm: LLM) -> EngineGroup:
    assert isinstance(llm._core, EngineGroup)
    return llm._core


def kill(llm: LLM, engine: int) -> None:
    """Kill the last rank of an engine."""
    assert llm._ranks is not None
    os.kill(llm._ranks.processes[(engine + 1) * group_of(llm)._width - 2].pid, signal.SIGKILL)


def answers_with_kills(llm: LLM, params: SamplingParams, kills: list[int]) -> list[list[int]]:
    """Kill some engines, one after the other, while requests run; each request tells when it has its turn."""
    lengths = [replace(params, max_tokens=5 + 5 * i) if i < len(kills) else params for i in range(len(PROMPTS))]
    jobs = [(llm.request(prompt, p), p) for prompt, p in zip(PROMPTS, lengths, strict=True)]
    victims, found = iter(kills), {}
    for request in llm.run(jobs, use_tqdm=False):
        found[request.request_id] = request.outputs[0].token_ids
        assert request.outputs[0].error is None
        if len(request.outputs[0].token_ids) < 60 and (victim := next(victims, None)) is not None:
            kill(llm, victim)
    assert next(victims, None) is None
    return [found[request.request_id] for request, _ in jobs]


@pytest.mark.parametrize(
    "case", [case if case == "strict" else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_the_texts_of_all_requests_are_those_without_a_loss(folder_of, case):
    options = {**OPTIONS, "determinism": "strict", **CASES[case]}
    folder = folder_of(options.pop("family", "qwen3_moe"))
    params = RANDOM if options["determinism"] else GREEDY
    with LLM(folder, **options) as alone:
        expected = answers(alone, params)
    options |= LAYOUTS.get(case, {})
    with LLM(folder, data_parallel_size=3, enable_expert_parallel=True, enable_elastic_ep=True, **options) as llm:
        found = answers_with_kills(llm, params, [1])
        stats = group_of(llm).stats()
        assert group_of(llm)._core.ranks.runner.parts[ExpertLayers].rank.spare_bytes > 0
        shared = stats.record(SharedSteps)
        assert shared is not None and shared.pause_s > 0
        assert (shared.generation, shared.engines) == (1, 2)
        spent = stats.record(CostStats).seconds
        assert 0 < spent["recovery"] < sum(spent.values())
        moved = [load.moved for load in stats.record(ExpertReport).stages]
        again = answers(llm, params)
        for load, before in zip(group_of(llm).stats().record(ExpertReport).stages, moved, strict=True):
            assert case != "copies" or (not load.stopped and load.moved > before), "they move on"
    for tokens, all_of_them in zip(found, expected, strict=True):
        assert tokens == all_of_them[: len(tokens)]
    assert again == expected


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    """Return a function that makes a mixture and a drafter of a method: the model's folder, and the options."""

    @cache
    def make(method: str) -> tuple[str, dict[str, Any]]:
        root = tmp_path_factory.mktemp(method)
        family = "glm4_moe" if method == "mtp" else "qwen3_moe"
        layers = 8 if method == "eagle3" else 3  # it reads three layers
        model = make_model(root / "model", family, tokenizer=True, num_hidden_layers=layers)
        if method == "mtp":  # its layer has a mixture of its own
            write_mtp(model)
            return str(model), {"method": method}
        drafter = root / "drafter"
        drafter.mkdir()
        if method == "eagle3":
            write_authors(drafter, PlainEagle3(False, DRAFT_VOCAB))
        else:  # a mixture, too, which mostly says what the model says
            copy_with_noise(model, drafter)
        return str(model), {"method": method, "model": str(drafter)}

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((method, {}) for method in ("mtp", "draft_model", "eagle3")),
        ("draft_model", {"tensor_parallel_size": 2}),
        ("mtp", {"dtype": "bfloat16", "async_scheduling": True}),
    ],
)
def test_drafters_with_weights_go_on_without_a_lost_engine_and_change_no_text(drafted, method, options):
    folder, speculative = drafted(method)
    options = {**OPTIONS, "determinism": "strict", **options}
    with LLM(folder, **{**options, "tensor_parallel_size": 1}) as alone:
        expected = answers(alone, RANDOM)
    options |= {"speculative_config": {**speculative, "num_speculative_tokens": 3}}
    with LLM(folder, data_parallel_size=3, enable_expert_parallel=True, enable_elastic_ep=True, **options) as llm:
        found = answers_with_kills(llm, RANDOM, [1])
        before = [stats.record(SpecDecodeStats).num_draft_tokens for stats in group_of(llm).all_stats()]
        assert answers(llm, RANDOM) == expected
        wait_until(
            lambda: all(
                stats.record(SpecDecodeStats).num_draft_tokens > drafts
                for stats, drafts in zip(group_of(llm).all_stats(), before, strict=True)
            )
        )
    for tokens, all_of_them in zip(found, expected, strict=True):
        assert tokens == all_of_them[: len(tokens)]


@pytest.mark.slow
def test_engines_that_die_one_after_the_other_or_at_once_leave_one_that_has_all_experts(folder_of):
    folder, options = folder_of("qwen3_moe"), {**OPTIONS, "determinism": "strict"}
    with LLM(folder, **options) as alone:
        expected = answers(alone, RANDOM)
    with LLM(folder, data_parallel_size=4, enable_expert_parallel=True, enable_elastic_ep=True, **options) as llm:
        found = answers_with_kills(llm, RANDOM, [2, 1, 3])
        for tokens, all_of_them in zip(found, expected, strict=True):
            assert tokens == all_of_them[: len(tokens)]
        assert answers(llm, RANDOM) == expected
        assert len(group_of(llm).all_stats()) == 1


@pytest.mark.slow
def test_an_engine_that_dies_while_none_has_requests_is_not_missed(folder_of):
    folder, options = folder_of("qwen3_moe"), {**OPTIONS, "determinism": "strict"}
    with LLM(folder, **options) as alone:
        expected = answers(alone, RANDOM)
    with LLM(folder, data_parallel_size=2, enable_expert_parallel=True, enable_elastic_ep=True, **options) as llm:
        assert answers(llm, RANDOM) == expected
        kill(llm, 1)
        wait_until(lambda: group_of(llm)._roster.generation == 1)  # type: ignore[union-attr]
        assert answers(llm, RANDOM) == expected


@pytest.mark.slow
def test_without_memory_for_the_experts_the_group_ends_as_without_the_option(folder_of, monkeypatch):
    options = {**OPTIONS, "data_parallel_size": 2, "enable_expert_parallel": True, "enable_elastic_ep": True}
    with LLM(folder_of("qwen3_moe"), **options) as llm:
        monkeypatch.setattr("engine.devices.host_memory.free_host_memory", lambda: FreeMemory(100, "the box"))
        with pytest.raises(EngineUnavailable, match=r"do not fit: rank 0 needs .* GiB are free"):
            answers_with_kills(llm, GREEDY, [1])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"data_parallel_size": 1}, "enable_elastic_ep must be false without data_parallel_size above 1"),
    ],
)
def test_what_engines_that_go_on_do_not_support_is_refused_by_name(options, error):
    with pytest.raises(ConfigError, match=error):
        EngineConfig(**{"data_parallel_size": 2, "enable_expert_parallel": True, "enable_elastic_ep": True, **options})
