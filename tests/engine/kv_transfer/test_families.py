"""Prompts that another engine has computed, for models whose attention or layers differ from Llama's: sinks, windows,
chunks, softcaps, experts, merged projections; by native code and by transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.options.handoff import HandoffConfig
from engine.options.speculation import SpeculativeConfig
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenDelta
from tests.deltas import deltas_of
from tests.engine.kv_transfer.pair import Pair
from tests.models import FAMILIES, make_model
from tests.products import in_turns, pairwise, slow
from tests.transformers_models import make_transformers_model

BY_TRANSFORMERS = ("SmolLM3ForCausalLM", "VaultGemmaForCausalLM", "Llama4ForCausalLM")
NATIVE = ("gpt_oss", "gemma2", "gemma3", "gemma3n", "gemma4", "gemma4_moe", "mixtral", "qwen3_moe", "phi3", "glm4_moe",
          "deepseek_v2", "deepseek_v3", "minicpm3", "deepseek_v32", "glm_moe_dsa", "mimo_v2_flash",
          "longcat_flash")  # fmt: skip
QUICK = {"gpt_oss", "Llama4ForCausalLM"}  # Gemma 3 is below
RECURRENT = ("qwen3_5", "nemotron_h", "lfm2", "kimi_linear")
# States, KV behind windows, or latents.
OTHER_RECURRENT = ("qwen3_next", "qwen3_5_moe", "bamba", "falcon_h1", "granite4", "granite4_moe", "lfm2_moe")
KEPT_APART = (
    *(*RECURRENT[1:], "gemma4", "gpt_oss", "gemma3n", "deepseek_v32", "glm_moe_dsa", *OTHER_RECURRENT),
    *("deepseek_v2", "minicpm3", "gemma2", "gemma4_moe"),
)
DTYPES = ("float32", "bfloat16")
BORDERS = (200, 129, 128, 64, 20)  # tokens behind borders of states, and none before one
LENGTHS = (33, 8, 1)  # more than the windows of 8 tokens, as many, and too few for a block


def make(folder: Path, name: str) -> Path:
    return make_model(folder, name) if name in FAMILIES else make_transformers_model(folder, name)


def make_config(folder: Path, role: str | None = None, tensor_parallel_size: int = 1, **options: Any) -> EngineConfig:
    handoff = HandoffConfig(role=role, policy="always", transport="tcp") if role else None
    sizes = {
        "block_size": 4,
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "num_threads": 1,
    }
    options = {"dtype": "float32", **sizes, **options}
    return EngineConfig(model=str(folder), tensor_parallel_size=tensor_parallel_size, handoff=handoff, **options)


def prompt(length: int) -> list[int]:
    return [3 + 7 * i * i % 89 for i in range(length)]


def alone(folder: Path, lengths: Sequence[int] = LENGTHS, **options: Any) -> list[tuple[list[int], list[float]]]:
    core = build_engine(make_config(folder, **options))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    answers = []
    for length in lengths:
        core.add(GenerateRequest(request_id=f"{length}", prompt=prompt(length), params=params))
        deltas = list(deltas_of(core, errors=True))
        answers.append(flat(deltas))
    core.close()
    return answers


def flat(deltas: list[TokenDelta]) -> tuple[list[int], list[float]]:
    entries = [entry for delta in deltas for entry in delta.logprobs or []]
    return [entry.token_id for entry in entries], [entry.logprob for entry in entries]


@pytest.mark.parametrize(
    ("name", "decode", "prefill"),
    [
        *(
            pytest.param(name, 1, 1, marks=[pytest.mark.slow] * (name not in QUICK))
            for name in (*NATIVE, *BY_TRANSFORMERS)
        ),
        *(
            pytest.param(name, decode, prefill, marks=pytest.mark.slow)
            for name in ("gpt_oss", "gemma3", "mixtral", "phi3", "VaultGemmaForCausalLM")
            for decode, prefill in ((1, 2), (2, 1))
        ),
    ],
)
def test_a_prompt_computed_by_another_engine_gives_the_same_tokens_and_log_probabilities(
    tmp_path, ranks, name, decode, prefill
):
    folder = make(tmp_path, name)
    expected = alone(folder)
    configs = make_config(folder, "decode", decode), make_config(folder, "prefill", prefill)
    with Pair(*configs, ranks) as pair:
        for length in LENGTHS:
            pair.ingress.add(f"{length}", prompt(length), logprobs=0)
        for length, (tokens, logprobs) in zip(LENGTHS, expected, strict=True):
            assert pair.ingress.tokens(f"{length}") == tokens
            assert flat(pair.ingress.deltas[f"{length}"])[1] == pytest.approx(logprobs, abs=1e-4)
        pair.settle()
        assert sum(pair.decode.status.handoffs.results["received"].values()) == len(LENGTHS)


def check_handed_over(configs, ranks, lengths, expected):
    """All prompts are computed by the prefill engine of a pair, whose answers have the bits of one engine."""
    with Pair(*configs, ranks) as pair:
        for length in lengths:
            pair.ingress.add(f"{length}", prompt(length), logprobs=0)
        for length in lengths:
            pair.ingress.last(f"{length}")
        assert [flat(pair.ingress.deltas[f"{length}"]) for length in lengths] == expected
        pair.settle()
        assert sum(pair.decode.status.handoffs.results["received"].values()) == len(lengths)


@pytest.mark.parametrize(
    ("family", "dtype", "sizes"),
    [
        ("llama", "bfloat16", (2, 1)),
        pytest.param("qwen3_moe", "float32", (1, 2), marks=pytest.mark.slow),
        *pairwise(slow(["llama", "qwen3_moe", "gemma3", "gpt_oss"]), DTYPES, [(1, 2), (2, 1), (4, 2)]),
    ],
)
def test_with_strict_determinism_pools_of_unequal_size_give_the_bits_of_one_engine(
    tmp_path, ranks, family, dtype, sizes
):
    (decode, prefill), options = sizes, {"dtype": dtype, "determinism": "strict"}
    folder = make_model(tmp_path, family)
    expected = alone(folder, **options)
    configs = make_config(folder, "decode", decode, **options), make_config(folder, "prefill", prefill, **options)
    check_handed_over(configs, ranks, LENGTHS, expected)


STAGES = {
    "one": {},
    "two": {"pipeline_parallel_size": 2},
    "first large": {"pipeline_parallel_size": 2, "pipeline_layers": "2,1"},
    "last large": {"pipeline_parallel_size": 2, "pipeline_layers": "1,2"},
    "three": {"pipeline_parallel_size": 3},
    "two of two": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "ranks": {"tensor_parallel_size": 2},
}


@pytest.mark.parametrize(
    ("family", "decode", "prefill"),
    [
        ("gemma3", "first large", "last large"),  # layers with windows and without, of which a stage has none
        *(
            pytest.param(family, decode, prefill, marks=pytest.mark.slow)
            for family, decode, prefill in (
                ("llama", "one", "two"),
                ("llama", "three", "one"),
                ("llama", "two", "three"),
                ("llama", "two of two", "first large"),
                ("llama", "ranks", "two of two"),
                ("gemma3", "one", "three"),
                ("qwen3_5", "two", "one"),
                ("qwen3_5", "three", "two"),
                ("deepseek_v3", "last large", "first large"),
            )
        ),
    ],
)
def test_engines_with_other_stages_hand_over_the_layers_that_both_hold(tmp_path, ranks, family, decode, prefill):
    options = {"determinism": "strict", "num_gpu_blocks_override": 400, "block_size": 16}
    folder = make_model(tmp_path, family)
    expected = alone(folder, BORDERS, **options)
    configs = (
        make_config(folder, "decode", **STAGES[decode], **options),
        make_config(folder, "prefill", **STAGES[prefill], **options),
    )
    check_handed_over(configs, ranks, BORDERS, expected)


@pytest.mark.parametrize(
    ("family", "dtype", "method", "spread"),
    pairwise(slow(["qwen3_moe", "deepseek_v3"]), DTYPES, [None, "ngram"], ["decode", "prefill"]),
)
def test_an_engine_with_whole_experts_and_one_with_slices_give_the_bits_of_one_engine(
    tmp_path, ranks, family, dtype, method, spread
):
    options = {"dtype": dtype, "determinism": "strict"}
    folder = make_model(tmp_path, family)
    expected, drafts = alone(folder, **options), SpeculativeConfig(method=method) if method else None
    decode, prefill = (
        make_config(folder, role, 2, enable_expert_parallel=role == spread, speculative_config=drafts, **options)
        for role in ("decode", "prefill")
    )
    check_handed_over((decode, prefill), ranks, LENGTHS, expected)


@pytest.mark.parametrize(
    ("family", "dtype", "size"),
    pairwise(["qwen3_5", *slow(["gemma3", "deepseek_v3"])], ["bfloat16", *slow(["float32"])], [1, *slow([2])])
    + in_turns(slow(KEPT_APART), DTYPES, [1, 2]),
)
def test_states_and_windows_are_handed_over_and_go_on_with_the_same_bits(tmp_path, ranks, family, dtype, size):
    """Also where prompts are cached on either side, and where prefill ends in the middle of them."""
    options = {"dtype": dtype, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 400, "block_size": 16}
    options["determinism"] = "strict" if size > 1 else None  # so that ranks have the bits of one
    folder = make_model(tmp_path, family)
    expected = alone(folder, BORDERS, **options)
    configs = make_config(folder, "decode", size, **options), make_config(folder, "prefill", size, **options)
    with Pair(*configs, ranks) as pair:

        def answers(kind: str) -> list[tuple[list[int], list[float]]]:
            for length in BORDERS:
                pair.ingress.last(f"{kind} {length}")
            return [flat(pair.ingress.deltas[f"{kind} {length}"]) for length in BORDERS]

        def ask(kind: str) -> None:
            for length in BORDERS:
                pair.ingress.add(f"{kind} {length}", prompt(length), logprobs=0)

        ask("first")
        assert answers("first") == expected
        pair.settle()
        assert sum(pair.decode.status.handoffs.results["received"].values()) == len(BORDERS)
        pair.decode.scheduler.kv_cache.clear_cache()
        ask("cached there")
        assert answers("cached there") == expected
        pair.settle()
        ask("cached here")
        assert answers("cached here") == expected
        pair.settle()
        pair.decode.scheduler.kv_cache.clear_cache()
        pair.prefill.scheduler.kv_cache.clear_cache()
        before = len(pair.remote_requests)
        ask("interrupted")
        pair.wait_for(lambda: len(pair.remote_requests) > before)
        pair.fails = True
        pair.prefill.stop()
        assert answers("interrupted") == expected
        pair.settle()


@pytest.mark.slow
def test_states_of_another_number_of_ranks_are_refused_and_the_prompt_computed_here(tmp_path, ranks):
    folder = make_model(tmp_path, "qwen3_5")
    options = {"num_gpu_blocks_override": 400, "block_size": 16}
    configs = make_config(folder, "decode", 1, **options), make_config(folder, "prefill", 2, **options)
    with Pair(*configs, ranks) as pair:
        pair.ingress.add("a", prompt(129), logprobs=0)
        pair.ingress.last("a")
        assert [flat(pair.ingress.deltas["a"])] == alone(folder, (129,), **options)
        pair.settle()
        assert set(pair.decode.status.handoffs.results["failed"]) == {"refused"}
