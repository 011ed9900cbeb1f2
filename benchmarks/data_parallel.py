"""Engines that share experts: python -m benchmarks.data_parallel

Tokens/s of the mixture of benchmarks/expert_parallel.py on one rank, on two tensor parallel ranks with whole experts,
and on two engines that share experts, one thread each.

    python -m benchmarks.data_parallel --exchanges

Tokens/s of two and four engines with each exchange of rows (docs/rank_groups.md), through shared memory and gloo, and
how many bytes the first rank sends per token of its engine and layer, beside what the formula says.
"""

from __future__ import annotations

import sys
import time
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.expert_parallel import LOADS, SHAPE, TOKENS, make_folder
from engine.config import EngineConfig
from engine.model.expert_parallel import remote_ranks
from engine.model.fixed_order import PARTS
from engine.options.experts import All2AllBackend
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from tests.rank_pool import RankPool
from tests.shared_engines import running

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    {"data_parallel_size": 2, "enable_expert_parallel": True},
]


EXCHANGES: tuple[All2AllBackend, ...] = ("allgather_reducescatter", "alltoall")
EXCHANGED = {"16 requests": (16, 0), "4 prompts of 1,000": (0, 4)}
#: Engines, whether they share memory, and determinism.
CASES: list[tuple[int, bool, Literal["strict"] | None]] = [
    (2, True, None),
    (4, True, None),
    (2, False, None),
    (4, False, None),
    (4, True, "strict"),
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
            model=str(folder),
            dtype="bfloat16",
            load_format="dummy",
            num_threads=1,
            num_gpu_blocks_override=1024,
            **layout,
        )
        shown = ", ".join(f"{key} {value}" for key, value in layout.items()) or "one rank"
        with running(pool, config) if config.data_parallel_size > 1 else pool.engine(config) as engine:
            compute(engine, 2, 1)
            for name, load in LOADS.items():
                started = time.perf_counter()
                computed = compute(engine, *load)
                rate = computed / (time.perf_counter() - started)
                print(f"{shown:44} {name:20} {rate:7.0f} tokens/s", flush=True)


class Counter:
    """Counts from now on what a rank sends to others, and the rows of its engine for which it does so."""

    def __init__(self, group: Any):
        self.bytes = self.rows = 0
        ranks, exchange = group.all_engines, group.expert_exchange
        gather, scatter, to_others, dispatch = (
            ranks.all_gather, ranks.reduce_scatter, ranks.all_to_all, exchange.dispatch
        )  # fmt: skip

        def gathered(x: Tensor) -> Tensor:
            self.bytes += (ranks.size - 1) * x.nbytes
            return gather(x)

        def scattered(x: Tensor) -> Tensor:
            self.bytes += (ranks.size - 1) * x[0].nbytes
            return scatter(x)

        def sent(x: Tensor, counts: Any) -> Tensor:
            own = counts[ranks.rank]
            self.bytes += (sum(own) - own[ranks.rank]) * x.shape[1:].numel() * x.element_size()
            return to_others(x, counts)

        def dispatched(x: Tensor, *others: Any) -> Any:
            self.rows += len(x)
            return dispatch(x, *others)

        ranks.all_gather, ranks.reduce_scatter, ranks.all_to_all = gathered, scattered, sent
        exchange.dispatch = dispatched


def sent_bytes(engines: int, backend: str, strict: bool) -> float:
    """Return what a rank has to send for a row of its engine and a layer."""
    k, row = SHAPE["num_experts_per_tok"], 2 * SHAPE["hidden_size"]
    ranks = remote_ranks(SHAPE["num_experts"], k, engines) if backend == "alltoall" else engines - 1
    there = ranks * (row + k * (2 + 4))  # with the weight and place of each expert
    if not strict:
        return there + ranks * row
    pairs = k * (engines - 1) / (engines if backend == "alltoall" else 1)
    return there + PARTS * pairs * row


def measure_exchanges(pool: RankPool) -> None:
    folder = make_folder()
    for (size, shared, determinism), backend in product(CASES, EXCHANGES):
        config = EngineConfig(
            model=str(folder), dtype="bfloat16", load_format="dummy", num_threads=1, num_gpu_blocks_override=512,
            enable_expert_parallel=True, data_parallel_size=size, all2all_backend=backend, determinism=determinism,
        )  # fmt: skip
        formula = sent_bytes(size, backend, determinism is not None)
        shown = f"{size} engines, {'shared memory' if shared else 'gloo'}, {determinism or 'plain'}, {backend}"
        with running(pool, config, shared_memory=shared) as engine:
            compute(engine, 2, 1)
            counted = Counter(engine.core.ranks.runner.tp)
            for name, load in EXCHANGED.items():
                counted.bytes = counted.rows = 0
                started = time.perf_counter()
                rate = compute(engine, *load) / (time.perf_counter() - started)
                sent = counted.bytes / counted.rows
                print(f"{shown:60} {name:20} {rate:5.0f} tokens/s, {sent:7.0f} bytes, {formula:7.0f}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    with RankPool() as pool:
        measure_exchanges(pool) if "--exchanges" in sys.argv[1:] else measure(pool)


if __name__ == "__main__":
    main()
