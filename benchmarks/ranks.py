"""The cost of several ranks: python -m benchmarks.ranks [collectives | plans | steps | pocket]

All are in microseconds.

collectives: all-reduce of [rows, 768] between two ranks, over gloo and over shared memory.
plans: time from sending a plan on rank 0 until rank 1 has it, and the time that sending takes on rank 0.
steps: a whole step of a tiny model, which computes next to nothing, on one rank and on two.
pocket: a whole step of the bundled model.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.distributed.plan_broadcast import PlanBroadcaster, PlanReceiver
from engine.distributed.tp_group import TPGroup
from engine.wire.generate_request import GenerateRequest
from engine.wire.plan import BlockChange, StepPlan
from engine.wire.sampling_params import SamplingParams
from tests.models import make_model
from tests.rank_pool import TIMEOUT_S, RankPool

ROWS = (1, 8, 64, 512, 2048)
PLANS = 1000
DTYPES = (torch.float32, torch.bfloat16)


def measure_all_reduce(group: TPGroup) -> list[list[float]]:
    """Medians, by dtype and number of rows."""
    return [[median_us(group, rows, dtype) for rows in ROWS] for dtype in DTYPES]


def median_us(group: TPGroup, rows: int, dtype: torch.dtype) -> float:
    x = torch.zeros(rows, 768, dtype=dtype)
    times = []
    with torch.inference_mode():
        for _ in range(2000 if rows <= 64 else 200):
            started = time.perf_counter()
            group.all_reduce(x)
            times.append(time.perf_counter() - started)
    return median(times)


def collectives(pool: RankPool) -> None:
    for shared_memory in (False, True):
        group = TPGroup.listen(2, device="cpu", shared_memory=shared_memory)
        pool.call(1, measure_as_rank_1, group.address, shared_memory)
        group.join(TIMEOUT_S)
        for dtype, times in zip(DTYPES, measure_all_reduce(group), strict=True):
            name = "shared memory" if shared_memory else "gloo"
            print(f"{name:14}{str(dtype)[6:]:10}", "".join(f"{t:9.0f}" for t in times), flush=True)
        pool.answer(1)


def measure_as_rank_1(address: str, shared_memory: bool) -> None:
    group = TPGroup.connect(1, 2, address, TIMEOUT_S, device="cpu", shared_memory=shared_memory)
    measure_all_reduce(group)


def plans(pool: RankPool) -> None:
    """A plan that decodes 64 sequences, four of which need another block."""
    blocks = [BlockChange(slot, 20, [slot]) for slot in range(4)]
    for name in ("ipc", "tcp"):
        group = TPGroup.listen(2, device="cpu")
        pool.call(1, receive_as_rank_1, group.address)
        group.join(TIMEOUT_S)
        if name == "tcp":
            group.local_size = 1  # as if the other rank were on another machine
        broadcaster = PlanBroadcaster(group)
        sent, costs = [], []
        for step in range(PLANS):
            time.sleep(0.002)  # the time of a step; the receiver falls asleep
            sent.append(time.monotonic())
            broadcaster.check()
            broadcaster.send(StepPlan(step, [], blocks, list(range(64)), [step] * 64, [1] * 64, [True] * 64))
            costs.append(time.monotonic() - sent[-1])
        received = json.loads(group.exchange("")[1])
        delays = [there - here for here, there in zip(sent, received, strict=True)]
        print(f"{name} delay={median(delays):.0f} sending={median(costs):.0f}", flush=True)
        broadcaster.close()
        pool.answer(1)


def receive_as_rank_1(address: str) -> None:
    group = TPGroup.connect(1, 2, address, TIMEOUT_S, device="cpu")
    receiver = PlanReceiver(group)
    times = []
    for _ in range(PLANS):
        receiver.receive(TIMEOUT_S)
        times.append(time.monotonic())
    group.exchange(json.dumps(times))
    receiver.close()


def steps(pool: RankPool) -> None:
    """Decoding 1, 8 and 64 sequences."""
    folder = make_model(Path(tempfile.mkdtemp()), "llama", num_hidden_layers=1, max_position_embeddings=2048)
    for overlap in (True, False):
        for size in (1, 2):
            decode(
                pool,
                model=str(folder),
                dtype="float32",
                num_threads=1,
                tensor_parallel_size=size,
                async_scheduling=overlap,
            )


def pocket(pool: RankPool) -> None:
    for size, threads in ((1, 1), (1, 2), (2, 1)):
        decode(pool, num_threads=threads, tensor_parallel_size=size)


def decode(pool: RankPool, **options: Any) -> None:
    config = EngineConfig(num_gpu_blocks_override=4096, **options)
    with pool.engine(config) as core:
        times = [step_us(core, seqs) for seqs in (1, 8, 64)]
    name = f"overlap={config.async_scheduling!s:6} ranks={config.tensor_parallel_size} threads={config.num_threads}"
    print(name, "".join(f"{t:9.0f}" for t in times), flush=True)


def step_us(core: EngineCore, seqs: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    for i in range(seqs):
        core.add(GenerateRequest(request_id=str(i), prompt=[5, 6, 7 + i % 90], params=params))
    times = []
    while core.has_work:
        started = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - started)
    return median(times)


def median(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e6


def main() -> None:
    torch.set_num_threads(1)
    pool = RankPool()
    for name in sys.argv[1:] or ["collectives", "plans", "steps", "pocket"]:
        kinds = {"collectives": collectives, "plans": plans, "steps": steps, "pocket": pocket}
        kinds[name](pool)
    pool.close()


if __name__ == "__main__":
    main()
