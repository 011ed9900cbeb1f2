"""Engines on a GPU and their reference on the CPU."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenLogprob
from tests.deltas import deltas_of


@dataclass(slots=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def margins(self) -> list[float]:
        """How much likelier the chosen token was than the next, at every position; needs logprobs=2 and greedy."""
        return [entry.top[0][1] - entry.top[1][1] for entry in self.logprobs]


INTERPRETED = "tests.gpu.stand_in" in sys.modules  # kernels take seconds: little is asked of them


def requests(count: int, vocab_size: int, **params: Any) -> list[GenerateRequest]:
    rng = random.Random(count)
    count, tokens, longest = (3, 4, 20) if INTERPRETED else (count, 24, 90)
    settings = {"temperature": 0.0, "ignore_eos": True, "max_tokens": tokens, **params}
    return [
        GenerateRequest(
            request_id=str(i),
            prompt=[rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, longest))],
            params=SamplingParams(**{**settings, "seed": i}),
        )
        for i in range(count)
    ]


def make_core(folder: Path, device: str, **options: Any) -> EngineCore:
    rows, tokens = (4, 32) if INTERPRETED else (16, 256)
    defaults = {"num_gpu_blocks_override": 256, "dtype": "float32", "allow_untested_kernels": True}
    defaults |= {"max_num_seqs": rows, "max_num_batched_tokens": tokens}
    return build_engine(EngineConfig(model=str(folder), device=device, **{**defaults, **options}))


def run(core: EngineCore, wanted: list[GenerateRequest]) -> dict[str, Answer]:
    answers = {request.request_id: Answer() for request in wanted}
    for request in wanted:
        core.add(request)
    for delta in deltas_of(core):
        answer = answers[delta.request_id]
        answer.tokens += delta.token_ids
        answer.logprobs += delta.logprobs or []
    return answers


def generate(folder: Path, device: str, wanted: list[GenerateRequest], **options: Any) -> dict[str, Answer]:
    core = make_core(folder, device, **options)
    try:
        return run(core, wanted)
    finally:
        core.close()


def check_same(found: dict[str, Answer], expected: dict[str, Answer], tolerance: float) -> None:
    """Each answer follows the expected one until a token was chosen there by less than `tolerance` (in logarithms of
    probabilities); from there on, both may be right. Fails too where that leaves less than half of all tokens."""
    compared = 0
    for name, answer in expected.items():
        for position, margin in enumerate(answer.margins()):
            got, want = found[name].tokens[position], answer.tokens[position]
            if got != want:
                assert margin < tolerance, (
                    f"request {name}, token {position}: {got}, expected {want}, margin {margin:.4f}"
                )
                break
            compared += 1
    total = sum(len(answer.tokens) for answer in expected.values())
    assert compared >= total / 2, f"only {compared} of {total} tokens could be compared"
