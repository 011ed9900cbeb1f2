"""Holds in a real engine: what a client was promised is there after everything else was evicted."""

from __future__ import annotations

import random

import pytest

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.door.inputs import CacheCleared
from engine.core.engine import EngineCore
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.cache_writes import HoldOutcome
from engine.wire.parts.holds import HoldMark, HoldStats, PromptHold
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenDelta
from tests.deltas import deltas_of
from tests.models import make_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
BLOCKS = {"llama": 128, "gemma3": 128, "qwen3_next": 1024, "deepseek_v3": 128}
"""By family. The recurrent states of a tiny model are as large as the KV of hundreds of tokens."""


def answer(core: EngineCore, name: str, prompt: list[int], hold: list[HoldMark] | None = None) -> list[TokenDelta]:
    asked = PromptHold(marks=hold) if hold else None
    core.add(GenerateRequest(request_id=name, prompt=prompt, params=PARAMS, client="alice").asking(asked))
    deltas = list(deltas_of(core, errors=True))
    return deltas


SLOW = {"qwen3_next"}


@pytest.mark.parametrize("family", [pytest.param(f, marks=[pytest.mark.slow] if f in SLOW else []) for f in BLOCKS])
def test_held_conversation_is_cached_after_a_flood_and_another_is_not(family, tmp_path):
    folder = make_model(tmp_path, family)
    config = EngineConfig(
        model=str(folder),
        num_gpu_blocks_override=BLOCKS[family],
        block_size=4,
        max_model_len=200,
        max_held_share_per_client=0.5,
    )
    core = build_engine(config)
    try:
        draw = random.Random(1)
        held, other = draw.choices(range(3, 97), k=150), draw.choices(range(3, 97), k=150)
        (first, *_) = answer(core, "held", held, [HoldMark(150, 60.0)])
        (outcome,) = first.records(HoldOutcome)
        assert outcome.refusal is None and outcome.tokens > 0
        answer(core, "other", other)
        for number in range(8):
            answer(core, f"flood {number}", draw.choices(range(3, 97), k=190))
        again, missed = answer(core, "held again", [*held, 7]), answer(core, "other again", [*other, 7])
        assert (again[0].num_cached_tokens, missed[0].num_cached_tokens) == (outcome.tokens, 0)
        stats = core.stats().record(HoldStats)
        assert stats is not None and (stats.holds, stats.granted) == (1, 1)
        core.apply(CacheCleared())
        computed = answer(core, "computed", [*held, 7])
        assert computed[0].num_cached_tokens == 0
        assert [delta.token_ids for delta in computed] == [delta.token_ids for delta in again]
    finally:
        core.close()


def test_request_that_bans_all_tokens_ends_no_hold_and_costs_no_cached_block(tmp_path):
    """Else one client could end the holds of all others that begin as its own prompt does."""
    folder = make_model(tmp_path, "llama")
    core = build_engine(EngineConfig(model=str(folder), num_gpu_blocks_override=128, block_size=4, max_model_len=100))
    try:
        prompt = random.Random(1).choices(range(3, 97), k=50)
        answer(core, "held", prompt, [HoldMark(50, 60.0)])
        banned = SamplingParams(allowed_token_ids=[5], bad_words_token_ids=[[5]])
        core.add(GenerateRequest(request_id="banned", prompt=[*prompt[:20], 7], params=banned, client="mallory"))
        deltas = list(deltas_of(core, errors=True))
        stats = core.stats().record(HoldStats)
        assert stats is not None and (stats.holds, stats.ended) == (1, {})
        assert deltas[-1].error is not None and deltas[-1].error.type == "invalid_request_error"
        assert answer(core, "again", [*prompt, 7])[0].num_cached_tokens == 48
    finally:
        core.close()
