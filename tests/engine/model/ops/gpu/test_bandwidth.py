"""Decode attention reads KV at 85 % of an H100's bandwidth, by count: of bytes, of tiles in flight, of programs on each
processor, and of instructions. What a card really reaches has to be measured (`make bench-gpu`)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import pytest
import torch

from engine.model.ops.gpu import attention
from tests.engine.model.ops.gpu.paged import Case
from tests.engine.model.ops.gpu.test_compile import compiled

pytestmark = pytest.mark.kernels

PROCESSORS, CLOCK_HZ, BYTES_PER_S = 132, 1.755e9, 3.0e12  # of an H100; bytes as it copies them
LATENCY_S = 0.8e-6  # from a load to its data, while the memory is busy
SHARED_BYTES, REGISTERS, SCHEDULERS = 227 * 1024, 65536, 4  # of a processor
STARTED_BYTES = 16 * 1024  # what a processor could have read while a program starts and ends
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of Llama 8B
TILE = attention.KEY_TILE_BYTES // (HEAD_DIM * 2)  # keys

BATCHES = {
    "one sequence of 8k tokens": [8192],
    "one of 100k among 63 of 1k": [100_000, *[1100] * 63],
    "64 of 1.1k": [1100] * 64,
    "256 of 1.1k": [1100] * 256,
    "64 of 200 to 4k": [200 + 60 * i for i in range(64)],
}


@dataclass(frozen=True)
class Kernel:
    """What the compiler says of `attend_kernel`."""

    shared: int
    registers: int
    loop: int  #: instructions for a tile of keys
    warps: int = 4

    @property
    def resident(self) -> int:
        """Programs that a processor runs at a time."""
        by_registers = REGISTERS // (self.registers * 32 * self.warps)
        return min(SHARED_BYTES // (self.shared + 1024), by_registers, attention.PROGRAMS_PER_PROCESSOR)


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    (found,) = (kernel for kernel in compiled("rows") if kernel["kernel"] == "attend_kernel")
    return Kernel(found["shared"], found["registers"], found["loop"])


def items_of(lengths: list[int]) -> torch.Tensor:
    """Return the items of `plan_kernel` [n, 9] for sequences of these lengths that decode, on 132 processors."""
    _, _, _, batch = Case([(3, 1)] * len(lengths)).inputs()
    batch.kv_len.copy_(torch.tensor(lengths))
    wanted = attention.PROGRAMS_PER_PROCESSOR * PROCESSORS // KV_HEADS
    items = attention.plan(batch, batch.single, wanted, 0, 0, TILE, decode=True).cpu()
    return items[items[:, 0] >= 0]


def share_of_bandwidth(lengths: list[int], kernel: Kernel) -> float:
    """Return the share of the card's bandwidth at which KV is read: its bytes, divided by what the processor with most
    work could have read, if processors take programs in the order of the grid as they become free."""
    items = items_of(lengths)
    keys, split = items[:, 5] - items[:, 4], items[:, 7] > 1
    assert int(keys.sum()) == sum(lengths), "every key is read once"
    partial = (HEADS // KV_HEADS) * HEAD_DIM * 4 * 2  # a split's result, written and read
    work = (keys * (2 * HEAD_DIM * 2) + split * partial + STARTED_BYTES // kernel.resident).tolist()
    ends = [0.0] * PROCESSORS * kernel.resident
    heapq.heapify(ends)
    for _ in range(KV_HEADS):
        for size in work:
            heapq.heapreplace(ends, ends[0] + size * kernel.resident)
    return sum(lengths) * KV_HEADS * 2 * HEAD_DIM * 2 / (max(ends) * PROCESSORS)


@pytest.mark.parametrize("batch", BATCHES)
def test_the_programs_of_a_decode_step_share_its_kv_evenly(batch, kernel):
    assert share_of_bandwidth(BATCHES[batch], kernel) >= 0.85


def test_as_many_tiles_are_in_flight_as_hide_the_memorys_latency(kernel):
    in_flight = kernel.resident * (kernel.shared - 2 * attention.KEY_TILE_BYTES)  # without the tile that is multiplied
    assert in_flight >= 2 * LATENCY_S * BYTES_PER_S / PROCESSORS


def test_a_tile_takes_fewer_instructions_than_the_memory_gives_time_for(kernel):
    seconds = 2 * attention.KEY_TILE_BYTES * PROCESSORS / BYTES_PER_S
    assert kernel.loop * kernel.warps <= 0.6 * seconds * CLOCK_HZ * SCHEDULERS
