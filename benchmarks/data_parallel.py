"""Engines that share experts: python -m benchmarks.data_parallel

Tokens/s of the mixture of benchmarks/expert_parallel.py on one rank, on two tensor parallel ranks with whole experts,
and on two engines that share experts, one thread each.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.expert_parallel import LOADS, TOKENS, make_folder
from engine.config import EngineConfig
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
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


def measure(pool: RankPool) -> None:
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


def main() -> None:
    torch.set_num_threads(1)
    with RankPool() as pool:
        measure(pool)


if __name__ == "__main__":
    main()
