"""Answers of a given form whose first token comes from another engine."""

from __future__ import annotations

import re
from typing import Any

import torch

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.options.handoff import HandoffConfig
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.engine.kv_transfer.pair import Pair
from tests.rank_pool import RankPool

FORMS: dict[str, dict[str, Any]] = {
    "regex": {"regex": "(?:ab|c){5,9}"},
    "one_token_at_most": {"choice": ["a", "b"]},
    "json": {"json": {"enum": ["first", "second", 3]}},
}


def make_config(role: str | None) -> EngineConfig:
    handoff = HandoffConfig(role=role, policy="always", transport="tcp") if role else None
    return EngineConfig(dtype="float32", num_gpu_blocks_override=128, max_num_seqs=8, num_threads=1, handoff=handoff)


def fields(form: str, **more: Any) -> dict[str, Any]:
    structure = StructuredOutputsParams(**FORMS[form])
    return {"temperature": 1.0, "seed": 5, "max_tokens": None, "structured_outputs": structure, **more}


def test_the_answer_is_that_of_one_engine_and_both_hold_to_the_form(monkeypatch):
    monkeypatch.setattr("engine.serving.endpoint.STATUS_PERIOD_S", 0.05)
    threads = torch.get_num_threads()
    prompt = list(range(100, 150))
    alone = build_engine(make_config(None))
    with Pair(make_config("decode"), make_config("prefill"), (RankPool(), RankPool())) as pair:
        for form in FORMS:
            params = SamplingParams(**fields(form))
            alone.add(GenerateRequest(request_id=form, prompt=prompt, params=params))
            expected = [token for token_ids in steps(alone) for token in token_ids]
            pair.forget()
            pair.ingress.add(form, prompt, **fields(form))
            assert pair.ingress.tokens(form) == expected
            assert pair.ingress.last(form).finish_reason == "stop"
        assert len(pair.remote_requests) == len(FORMS)
        pair.ingress.add("hopeless", prompt, **fields("regex", structured_outputs=StructuredOutputsParams(regex="a(")))
        error = pair.ingress.last("hopeless").error
        assert error.status == 400 and re.search("unclosed group", error.message)
        pair.settle()
    alone.close()
    torch.set_num_threads(threads)


def steps(core: EngineCore):
    while core.has_work:
        yield from (event.delta.token_ids for event in core.step())
