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
        return min(SHARED_BYTES // (self.shared + 1024), by_registers)


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    (found,) = (kernel for kernel in compiled("rows") if kernel["kernel"] == "attend_kernel")
    return Kernel(found["shared"], found["registers"], found["loop"])


def items_of(lengths: list[int]) -> torch.Tensor:
    """Return the items of `plan_kernel` [n, 9] for sequences of these lengths that decode, on 132 processors."""
    _, _, _, batch = Case([(3, 1)] * len(lengths)).inputs()
    batch.kv_len.copy_(torch.tensor(lengths))
    wanted = attention.DECODE_PROGRAMS * PROCESSORS // KV_HEADS
    items = attention.plan(batch, batch.single, wanted, 0, 0, TILE, decode=True).cpu()
    return items[items[:, 0] >= 0]


class Processor:
    """Runs several programs at a time, which share its bandwidth evenly."""

    def __init__(self) -> None:
        self.ends: list[float] = []  # bytes that each will have read, and all others as many, when it has read its own
        self._read, self._time = 0.0, 0.0

    def start(self, time: float, work: float) -> None:
        self._read = self._at(time)
        self._time = time
        heapq.heappush(self.ends, self._read + work)

    def next_end(self) -> float:
        return self._time + (self.ends[0] - self._read) * len(self.ends)

    def end(self) -> float:
        """End the program that ends next, and return when."""
        time = self.next_end()
        self._read, self._time = heapq.heappop(self.ends), time
        return time

    def _at(self, time: float) -> float:
        return self._read + (time - self._time) / len(self.ends) if self.ends else self._read


def last_end(work: list[float], resident: int) -> float:
    """Return when the last program ends, in bytes that a processor reads, if each processor takes the next program of
    the grid whenever it has room."""
    processors = [Processor() for _ in range(PROCESSORS)]
    places = iter([processor for _ in range(resident) for processor in processors])
    waiting, time = iter(work), 0.0
    for processor, size in zip(places, waiting, strict=False):
        processor.start(0.0, size)
    while busy := [processor for processor in processors if processor.ends]:
        first = min(busy, key=Processor.next_end)
        time = first.end()
        if (size := next(waiting, None)) is not None:
            first.start(time, size)
    return time


def share_of_bandwidth(lengths: list[int], kernel: Kernel) -> float:
    """Return the share of the card's bandwidth at which KV is read: its bytes, divided by what all processors could
    have read until the last program ends."""
    items = items_of(lengths)
    keys, split = items[:, 5] - items[:, 4], items[:, 7] > 1
    assert int(keys.sum()) == sum(lengths), "every key is read once"
    partial = (HEADS // KV_HEADS) * HEAD_DIM * 4 * 2  # a split's result, written and read
    work = (keys * (2 * HEAD_DIM * 2) + split * partial + STARTED_BYTES // kernel.resident).tolist() * KV_HEADS
    return sum(lengths) * KV_HEADS * 2 * HEAD_DIM * 2 / (last_end(work, kernel.resident) * PROCESSORS)


@pytest.mark.parametrize("batch", BATCHES)
def test_the_programs_of_a_decode_step_share_its_kv_evenly(batch, kernel):
    assert share_of_bandwidth(BATCHES[batch], kernel) >= 0.85


def test_as_many_tiles_are_in_flight_as_hide_the_memorys_latency(kernel):
    in_flight = kernel.resident * (kernel.shared - 2 * attention.KEY_TILE_BYTES)  # without the tile that is multiplied
    assert in_flight >= 2 * LATENCY_S * BYTES_PER_S / PROCESSORS


def test_a_tile_takes_fewer_instructions_than_the_memory_gives_time_for(kernel):
    seconds = 2 * attention.KEY_TILE_BYTES * PROCESSORS / BYTES_PER_S
    assert kernel.loop * kernel.warps <= 0.6 * seconds * CLOCK_HZ * SCHEDULERS
