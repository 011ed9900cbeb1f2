"""Engines that share experts: python -m benchmarks.data_parallel [tokens | host]

tokens: tokens/s of the mixture of benchmarks/expert_parallel.py on one rank, on two tensor parallel ranks with whole
    experts, and on two engines that share experts, one thread each.
host: microseconds of CPU time that the thread of the step loop takes per step, with 1, 2 and 4 engines of a small
    mixture. It does not include the model's time, which another thread takes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.expert_parallel import LOADS, TOKENS, make_folder
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.core.output import Event
from engine.wire.messages import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from tests.models import make_model
from tests.rank_pool import RankPool
from tests.shared_engines import running

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor_parallel": 2, "expert_parallel": True},
    {"data_parallel": 2, "expert_parallel": True},
]


def compute(engine: Any, decoding: int, prompts: int) -> int:
    """Return the number of tokens computed. Each prompt is new, so none is cached."""
    for i in range(decoding + prompts):
        length, count = (8, TOKENS) if i < decoding else (1000, 1)
        prompt = torch.randint(3, 8192, (length,)).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        engine.add(GenerateRequest(request_id=str(i), prompt=prompt, params=params))
    while engine.has_work:
        engine.step()
    return TOKENS * decoding + 1000 * prompts


def tokens(pool: RankPool) -> None:
    folder = make_folder()
    for layout in LAYOUTS:
        config = EngineConfig(
            model=str(folder), dtype="bfloat16", load_format="dummy", num_threads=1, num_blocks=1024, **layout
        )
        shown = ", ".join(f"{key} {value}" for key, value in layout.items()) or "one rank"
        with running(pool, config) if config.data_parallel > 1 else pool.engine(config) as engine:
            compute(engine, 2, 1)
            for name, load in LOADS.items():
                started = time.perf_counter()
                computed = compute(engine, *load)
                rate = computed / (time.perf_counter() - started)
                print(f"{shown:44} {name:20} {rate:7.0f} tokens/s", flush=True)


def host(pool: RankPool) -> None:
    folder = make_model(Path(tempfile.mkdtemp()), "qwen3_moe", max_position_embeddings=2048)
    options = {"model": str(folder), "device": "cpu", "dtype": "float32", "num_threads": 1, "num_blocks": 4096,
               "overlap": True}  # fmt: skip
    for engines in (1, 2, 4):
        config = EngineConfig(**options, data_parallel=engines, expert_parallel=engines > 1)
        with running(pool, config) if engines > 1 else pool.engine(config) as engine:
            core = engine.core if engines > 1 else engine
            times = [f"{seqs}: {host_us(engine, core, seqs, engines):5.0f} us" for seqs in (4, 64)]
        print(f"engines {engines}, requests of each {', '.join(times)} per step", flush=True)


def host_us(engine: Any, core: EngineCore, seqs: int, engines: int) -> float:
    """Return the microseconds of this thread per step of the first engine, without reading the others' tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    for i in range(seqs * engines):
        request = GenerateRequest(request_id=f"{seqs}-{i}", prompt=[5, 6, 7 + i % 80], params=params)
        engine.add(request)
    for _ in range(50):
        engine.step()
    step, taken, before = core.step, 0.0, core.stats().steps

    def timed() -> list[Event]:
        nonlocal taken
        started = time.thread_time()
        events = step()
        taken += time.thread_time() - started
        return events

    core.step = timed  # type: ignore[method-assign]
    while core.has_work:
        engine.step()
    del core.step  # type: ignore[method-assign]
    steps = core.stats().steps - before
    while engine.has_work:
        engine.step()
    return taken / steps * 1e6


def main() -> None:
    torch.set_num_threads(1)
    with RankPool() as pool:
        for name in sys.argv[1:] or ["tokens", "host"]:
            {"tokens": tokens, "host": host}[name](pool)


if __name__ == "__main__":
    main()
