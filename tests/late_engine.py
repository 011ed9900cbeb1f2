"""A small engine, plainly on a CPU or on a late device, and requests for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.model.ops import dispatch, linear
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenLogprob
from tests.deltas import deltas_of
from tests.late_device import LateDevice
from tests.sync_guard import forbid_waits
from tests.tape import tape_kernels

Answers = dict[str, tuple[list[int], list[TokenLogprob]]]


def requests(count: int = 7, **params) -> list[GenerateRequest]:
    """Prompts of different lengths, which arrive together and end one after the other."""
    rng = random.Random(count)
    prompts = [[rng.randrange(3, 97) for _ in range(rng.randrange(1, 30))] for _ in range(count)]
    return [
        GenerateRequest(
            request_id=str(i),
            prompt=prompt,
            params=SamplingParams(**{"temperature": 0.0, "max_tokens": 4 + 3 * i, "ignore_eos": True, **params}),
        )
        for i, prompt in enumerate(prompts)
    ]


def generate(
    folder: Path, wanted: list[GenerateRequest], device: LateDevice | None, cores: list[EngineCore] | None = None,
    **options,
) -> Answers:  # fmt: skip
    """Tokens and log-probabilities of each request, by plain ops. On a device whatever would make the host wait for it
    raises. cores: where to leave the engine."""
    with pytest.MonkeyPatch.context() as patch:
        use_device(patch, device)
        if device is not None:
            forbid_waits(patch)
        core = build_engine(small_config(folder, **options))
        if cores is not None:
            cores.append(core)
        answers = answer(core, wanted)
        core.close()
    return answers


def small_config(folder: Path, **options: Any) -> EngineConfig:
    defaults = {"block_size": 4, "max_num_seqs": 8, "num_gpu_blocks_override": 64, "num_threads": 1, "dtype": "float32",
                "max_num_batched_tokens": 20}  # fmt: skip
    return EngineConfig(model=str(folder), **{**defaults, **options})


def use_device(patch: pytest.MonkeyPatch, device: LateDevice | None) -> None:
    """Build models of plain ops from now on, and run them on a device if there is one."""
    patch.setattr(dispatch, "cpu_kernels", lambda dtype, device: False)  # they know no padding
    patch.setattr(linear, "cpu_kernels", lambda: None)  # nor does a tape see what is no operation of torch
    if device is not None:
        patch.setattr("engine.runner.rank_setup.open_device", lambda name: device)
        tape_kernels(patch)


def answer(core: EngineCore, wanted: list[GenerateRequest]) -> Answers:
    answers: Answers = {request.request_id: ([], []) for request in wanted}
    for request in wanted:
        core.add(request)
    for delta in deltas_of(core):
        tokens, logprobs = answers[delta.request_id]
        tokens += delta.token_ids
        logprobs += delta.logprobs or []
    return answers
