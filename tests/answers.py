"""What an engine answers to several requests at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.wire.generate_request import GenerateRequest
from engine.wire.part_record import PartRecord
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenDelta, TokenLogprob
from tests.deltas import deltas_of

MAX_TOKENS = 8


class Answers:
    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        self.errors: dict[str, str] = {}
        self.cached: dict[str, int] = {}

    def add(self, delta: TokenDelta) -> None:
        name = delta.request_id
        self.tokens.setdefault(name, []).extend(delta.token_ids)
        self.logprobs.setdefault(name, []).extend(delta.logprobs or [])
        self.cached[name] = self.cached.get(name, 0) + delta.num_cached_tokens
        if delta.error is not None:
            self.errors[name] = delta.error.message


def ask(core: Any, requests: Mapping[str, tuple[list[int], PartRecord | None]], **params: Any) -> Answers:
    """Return the answers to some prompts. A prompt may come with what it asks of a part."""
    settings = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": 1, **params}
    answers = Answers()
    for name, (tokens, record) in requests.items():
        core.add(GenerateRequest(request_id=name, prompt=tokens, params=SamplingParams(**settings)).asking(record))
    for delta in deltas_of(core, errors=True):
        answers.add(delta)
    return answers


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 90, (length,), generator=torch.Generator().manual_seed(100 * seed + length)).tolist()
