"""Prompts with adapters that another engine computes: the text is that of one engine alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.lora.adapter_files import PIRATE, open_adapter
from engine.options.handoff import HandoffConfig
from engine.parts.lora.adapter_slots import AdapterSlots
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.sampling_params import SamplingParams
from tests.answers import MAX_TOKENS
from tests.deltas import deltas_of
from tests.engine.kv_transfer.faulty_pair import FaultyPair
from tests.engine.kv_transfer.pair import Pair
from tests.engine.lora.adapted_models import BACKEND
from tests.products import slow
from tests.rank_pool import RankPool

PROMPT = list(range(100, 150))
LORA = ModelAdapter("pirate", str(PIRATE), open_adapter(PIRATE).digest)


def make_config(role: str | None, **options: Any) -> EngineConfig:
    handoff = None if role is None else HandoffConfig(role=role, policy="always", transport="tcp")
    sizes = {"block_size": 16, "num_gpu_blocks_override": 64, "max_num_seqs": 4, "num_threads": 1}
    return EngineConfig(dtype="float32", handoff=handoff, enable_lora=True, **{**sizes, **options})


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    core, answers = build_engine(make_config(None)), {"with": [], "without": []}
    for name, lora in (("with", LORA), ("without", None)):
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        core.add(GenerateRequest(request_id=name, prompt=PROMPT, params=params).asking(lora))
    for delta in deltas_of(core, errors=True):
        answers[delta.request_id] += delta.token_ids
    core.close()
    return answers


def test_a_prompt_computed_elsewhere_has_the_adapter_there_too_and_shares_no_block_with_the_model(alone, monkeypatch):
    monkeypatch.setattr("engine.serving.endpoint.STATUS_PERIOD_S", 0.05)
    assert alone["with"] != alone["without"]
    configs = make_config("decode"), make_config("prefill", max_num_batched_tokens=32)
    with Pair(*configs, (RankPool(), RankPool())) as pair:
        for name, lora in (("with", LORA), ("without", None), ("with", LORA)):
            turn = f"{name} {len(pair.remote_requests)}"
            pair.ingress.add(turn, PROMPT, lora)
            assert pair.ingress.tokens(turn) == alone[name]
        pair.settle()
        assert [request.record(ModelAdapter) for request in pair.remote_requests] == [LORA, None, LORA]
        assert [request.skip for request in pair.remote_requests] == [0, 0, 48], "each finds only its own blocks"
        assert pair.prefill.scheduler.parts[AdapterSlots].digests == [LORA.digest]


def test_what_the_other_engine_cannot_read_is_computed_here_or_refused_and_nothing_hangs(alone, monkeypatch):
    monkeypatch.setattr("engine.serving.endpoint.STATUS_PERIOD_S", 0.05)
    prefill = replace(make_config("prefill"), enable_lora=False)
    with Pair(make_config("decode"), prefill, (RankPool(), RankPool())) as pair:
        pair.ingress.add("with", PROMPT, LORA)
        assert pair.ingress.tokens("with") == alone["with"]
        pair.settle()


# beside Llama: states, windows, latents, merged layers, experts of transformers' code
@pytest.mark.parametrize("family", ["llama", *slow(["qwen3_5", "gemma3", "deepseek_v3", "phi3", *BACKEND[-2:]])])
def test_tokens_are_those_of_peft_through_a_prefill_engine_and_after_a_kill_and_a_replay(family, adapted):
    """The decode engine dies in the middle of the answers; what replaces it goes on with them."""
    model = adapted(family)
    sizes = {
        "model": str(model.folder),
        "max_loras": 2,
        "max_num_seqs": 8,
        "block_size": 4,
        "num_gpu_blocks_override": 200,
    }
    pair = FaultyPair(make_config("decode", **sizes), make_config("prefill", **sizes, max_num_batched_tokens=16))

    def ask(adapted: bool) -> None:
        for name, (tokens, lora) in model.requests.items():
            if (lora is not None) == adapted:
                pair.ask(name, tokens, lora=lora, max_tokens=MAX_TOKENS)

    try:
        pair.decode.process.pace(2)  # nobody has all tokens after these steps
        ask(adapted=True)
        pair.until(lambda: any(asked.tokens for asked in pair.asked.values()), "tokens are under way")
        ask(adapted=False)
        pair.kill("decode")
        pair.start("decode")
        assert {name: pair.end_of(name).tokens for name in model.requests} == model.expected
        pair.settle()
        assert sum(pair.decode.status.handoffs.results["received"].values()) == len(model.requests)
    finally:
        pair.close()
