"""The cost of several ranks: python -m benchmarks.ranks [collectives | plans | steps | pocket | stages]

All but the last are in microseconds.

collectives: all-reduce of [rows, 768] between two ranks, over gloo and over shared memory.
plans: time from sending a plan on rank 0 until rank 1 has it, and the time that sending takes on rank 0.
steps: a whole step of a tiny model, which computes next to nothing, on one rank and on two.
pocket: a whole step of the bundled model.
stages: tokens/s of a model over pipeline stages and over tensor parallel ranks, with one thread per rank; and for each
    rank the share of the time in which it waits, which is that in which its process uses no CPU.
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
from engine.wire.messages import GenerateRequest
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
            decode(pool, model=str(folder), dtype="float32", num_threads=1, tensor_parallel=size, overlap=overlap)


def pocket(pool: RankPool) -> None:
    for size, threads in ((1, 1), (1, 2), (2, 1)):
        decode(pool, num_threads=threads, tensor_parallel=size)


def decode(pool: RankPool, **options: Any) -> None:
    config = EngineConfig(num_blocks=4096, **options)
    with pool.engine(config) as core:
        times = [step_us(core, seqs) for seqs in (1, 8, 64)]
    name = f"overlap={config.overlap!s:6} ranks={config.tensor_parallel} threads={config.num_threads}"
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


def stages(pool: RankPool) -> None:
    """Decode with 1, 2 and 8 requests; then compute prompts of 1,000 tokens, alone and among 8 requests that decode."""
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16, "num_attention_heads": 8}
    folder = make_model(
        Path(tempfile.mkdtemp()), "llama", **shape, num_key_value_heads=4, head_dim=64, vocab_size=8192,
        max_position_embeddings=2048,
    )  # fmt: skip
    loads = {
        "1 request": (1, 0),
        "2 requests": (2, 0),
        "8 requests": (8, 0),
        "1 prompt": (0, 1),
        "8 and 2 prompts": (8, 2),
    }
    for layout in ({}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"pipeline_parallel": 2, "overlap": False}):
        config = EngineConfig(
            model=str(folder), dtype="bfloat16", num_threads=1, num_blocks=1024, max_num_batched_tokens=128, **layout
        )
        with pool.engine(config) as core:
            decode_and_prefill(core, 1, 1)
            for name, (decoding, prompts) in loads.items():
                before, started = pool.cpu_seconds(config.num_ranks), time.perf_counter()
                tokens = decode_and_prefill(core, decoding, prompts)
                wall = time.perf_counter() - started
                used = [b - a for a, b in zip(before, pool.cpu_seconds(config.num_ranks), strict=True)]
                waits = " ".join(f"{max(0.0, 1 - cpu / wall):4.0%}" for cpu in used)
                print(f"{layout!s:50} {name:16} {tokens / wall:8.0f} tokens/s, ranks wait {waits}", flush=True)


def decode_and_prefill(core: EngineCore, decoding: int, prompts: int) -> int:
    """Return the number of tokens computed."""
    many = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    vocabulary = core.model_config.vocab_size
    for i in range(decoding):
        core.add(GenerateRequest(request_id=f"decode {i}", prompt=[5, 6, 7 + i], params=many))
    once = SamplingParams(temperature=0.0, max_tokens=1)
    for i in range(prompts):
        prompt = torch.randint(vocabulary, (1000,), generator=torch.Generator().manual_seed(i)).tolist()
        core.add(GenerateRequest(request_id=f"prompt {i}", prompt=prompt, params=once))
    while core.has_work:
        core.step()
    core.scheduler.clear_cache()
    return 120 * decoding + 1000 * prompts


def median(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e6


def main() -> None:
    torch.set_num_threads(1)
    pool = RankPool()
    for name in sys.argv[1:] or ["collectives", "plans", "steps", "pocket"]:
        kinds = {"collectives": collectives, "plans": plans, "steps": steps, "pocket": pocket, "stages": stages}
        kinds[name](pool)
    pool.close()


if __name__ == "__main__":
    main()
