"""Collectives between processes of one machine, through memory that they share.

All-reduce of [rows, 768] between two ranks on the two cores of an idle EPYC, median of 2000 (up to 64 rows) or 200, in
microseconds, by `python -m benchmarks.ranks collectives`:

    rows                       1      8     64    512   2048
    gloo           float32   211    219    251    702   3690
                   bfloat16  188    196    221    509   2455
    shared memory  float32     9     10     21    123    468
                   bfloat16    8     10     18     85    332

So gloo is not used within a machine, except on systems other than Linux, which lack memfd, pidfd and /proc. The memory
has no name (memfd), so it is freed however a rank ends.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from engine.errors import EngineUnavailable

CHUNK_BYTES = 1 << 20  # larger tensors go chunk by chunk, and stay in a core's cache on the way
CACHE_LINE_BYTES = 64  # counters that share a cache line would slow each other down
SPINS = 2000  # polls of a counter before the core is yielded; a few microseconds
YIELDS = 2000  # yields before the wait turns into naps
NAP_US = 50

_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


@intrinsic
def _read(_: Any, counters: Any, index: Any) -> Any:
    """Read a counter. Everything that its writer wrote earlier is visible afterwards."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.load_atomic(builder.gep(array.data, [args[1]]), "acquire", 8)

    return types.int64(counters, types.int64), generate


@intrinsic
def _write(_: Any, counters: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        builder.store_atomic(args[2], builder.gep(array.data, [args[1]]), "release", 8)
        return context.get_dummy_value()

    return types.void(counters, types.int64, types.int64), generate


@njit("int64(int64[::1], int64, int64, int64)", nogil=True, cache=True)  # nogil: other threads go on meanwhile
def _barrier(counters: Any, rank: int, number: int, nap_us: int) -> int:
    """Announce that `rank` has reached `number`, and wait for the others. Returns -1 once all have reached it. After a
    while, returns a rank that has not reached it, so that the caller can look for the reason and call again."""
    step = CACHE_LINE_BYTES // 8
    _write(counters, rank * step, number)
    for other in range(len(counters) // step):
        polls = 0
        while _read(counters, other * step) < number:
            polls += 1
            if nap_us:
                _usleep(types.uint32(nap_us))
                if polls > 20:
                    return other
            elif polls > SPINS:
                _sched_yield()
                if polls > SPINS + YIELDS:
                    return other
    return -1


class SharedMemory:
    """One rank's end of collectives over shared memory.

    Each rank has two buffers and a counter. For each chunk it writes into one buffer, raises its counter, and reads
    every rank's buffer once no counter is lower. The buffers alternate: a rank that has reached the next chunk has read
    the previous one, so one barrier per chunk suffices. Every rank adds in rank order, so all get the same bits.
    """

    def __init__(self, rank: int, pids: list[int], path: str | None, timeout_s: float):
        """pids: process ids of all ranks.
        path: path of rank 0's memory; None on rank 0, which creates it.
        timeout_s: how long to wait for a rank that is alive. Raises OSError if the system refuses."""
        self.rank, self.size = rank, len(pids)
        self._timeout_s = timeout_s
        self._number = 0
        self._broken: str | None = None
        self._poll = select.poll()
        self._peers: dict[int, int] = {}  # file (pidfd) that becomes readable when a rank's process ends -> rank
        for other, pid in enumerate(pids):
            if other != rank and pid != os.getpid():
                file = os.pidfd_open(pid)
                self._peers[file] = other
                self._poll.register(file, select.POLLIN)
        head = CACHE_LINE_BYTES * self.size
        total = head + 2 * self.size * CHUNK_BYTES
        if path is None:
            self._file = os.memfd_create("manta-ranks")
            os.ftruncate(self._file, total)
        else:
            self._file = os.open(path, os.O_RDWR)
        memory = mmap.mmap(self._file, total)
        self._counters = np.frombuffer(memory, dtype=np.int64, count=head // 8)
        self._left = self._counters[1 :: CACHE_LINE_BYTES // 8]  # flags, next to the counters: 1 if the rank has left
        self._buffers = torch.frombuffer(memory, dtype=torch.uint8, offset=head).view(2, self.size, CHUNK_BYTES)
        self._typed: dict[torch.dtype, list[tuple[Tensor, ...]]] = {}

    @property
    def path(self) -> str:
        """Path by which other ranks open this rank's memory, valid until `close_file`."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def close_file(self) -> None:
        """Close the file. Call it once every rank has mapped it."""
        os.close(self._file)

    def all_reduce(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        for chunk in flat.split(CHUNK_BYTES // x.element_size()):
            chunks = self._exchange(chunk)
            torch.add(chunks[0], chunks[1], out=chunk)
            for other in chunks[2:]:
                chunk += other
        return flat.view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return [size, *x.shape]."""
        flat = x.reshape(-1)
        out = x.new_empty(self.size, flat.numel())
        start = 0
        for chunk in flat.split(CHUNK_BYTES // x.element_size()):
            stop = start + chunk.numel()
            for rank, other in enumerate(self._exchange(chunk)):
                out[rank, start:stop] = other
            start = stop
        return out.view(self.size, *x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        flat = x.reshape(self.size, -1)
        out = torch.empty_like(flat[self.rank])
        count = CHUNK_BYTES // x.element_size() // self.size
        for part, total in zip(flat.split(count, dim=1), out.split(count), strict=True):
            first, second, *others = (chunk.view(part.shape)[self.rank] for chunk in self._exchange(part.reshape(-1)))
            torch.add(first, second, out=total)
            for other in others:
                total += other
        return out.view(x.shape[1:])

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        flat, size, received = x.reshape(-1), x.shape[1:].numel(), sum(row[self.rank] for row in counts)
        out = x.new_empty(received * size)
        starts = [sum(row[: self.rank]) * size for row in counts]  # of what each rank has for this one
        ends = [start + row[self.rank] * size for start, row in zip(starts, counts, strict=True)]
        at_once = CHUNK_BYTES // x.element_size()
        for first in range(0, max(map(sum, counts)) * size, at_once):
            last, place = first + at_once, 0
            chunks = self._exchange(flat[first:last], at_once)
            for chunk, start, end in zip(chunks, starts, ends, strict=True):
                begin, stop = max(start, first), min(end, last)
                if begin < stop:
                    out[place + begin - start : place + stop - start] = chunk[begin - first : stop - first]
                place += end - start
        return out.view(received, *x.shape[1:])

    def abort(self, reason: str) -> None:
        """Make the current wait and all later waits raise EngineUnavailable."""
        self._broken = reason

    def close(self) -> None:
        """Tell ranks that may be waiting for this one that it has left. The process itself may continue."""
        self._left[self.rank] = 1

    def _exchange(self, chunk: Tensor, count: int | None = None) -> list[Tensor]:
        """Return every rank's chunk. The tensors are valid until the end of the next exchange. count: the most that a
        rank has, if chunks are unequal."""
        self._number += 1
        buffers = self._typed.get(chunk.dtype)
        if buffers is None:
            with torch.inference_mode(False):  # else only steps could write to them
                buffers = self._typed[chunk.dtype] = [turn.view(chunk.dtype).unbind() for turn in self._buffers]
        own = chunk.numel()
        chunks = [buffer[: count or own] for buffer in buffers[self._number % 2]]
        chunks[self.rank][:own].copy_(chunk)
        if _barrier(self._counters, self.rank, self._number, 0) >= 0:
            self._wait()
        return chunks

    def _wait(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while (late := _barrier(self._counters, self.rank, self._number, NAP_US)) >= 0:
            if self._broken is not None:
                raise EngineUnavailable(self._broken)
            dead = [self._peers[file] for file, _ in self._poll.poll(0)]
            if dead or self._left[late]:
                raise EngineUnavailable(f"rank {min(dead, default=late)} is gone")
            if time.monotonic() > deadline:
                raise EngineUnavailable(f"rank {late} did not join a collective within {self._timeout_s:.0f} s")

    def __del__(self) -> None:
        for file in getattr(self, "_peers", ()):
            os.close(file)
