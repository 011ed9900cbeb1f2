"""Collective operations between ranks, and those of torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions, ReduceScatterOptions

from engine.errors import EngineUnavailable

COLLECTIVE_TIMEOUT_S = 120.0  # long, although ranks do equal work: a first step may compile kernels


class Collectives(Protocol):
    """A way to sum and gather tensors across ranks."""

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x`, stacked: [size, *x.shape]."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks of this rank's part of x [size, ...]."""

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """Send the rows of x [rows, ...] to ranks, and return those that have come, by sender. counts: numbers of rows,
        by sender and receiver. x has its rows by receiver."""

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


class ProcessGroup:
    """Collectives of torch.distributed."""

    def __init__(self, group: Any, size: int):
        """group: a process group of torch.distributed."""
        self.group, self._size = group, size

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        options = dist.AllreduceOptions()
        options.asyncOp = False  # NCCL runs in the layers' stream, without events to and from another
        self._run(lambda: self.group.allreduce([x], options))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        out = x.new_empty(self._size * flat.numel())
        options = AllgatherOptions()
        options.asyncOp = False
        self._run(lambda: self.group._allgather_base(out, flat, options))
        return out.view(self._size, *x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        out = x.new_empty(flat.numel() // self._size)
        options = ReduceScatterOptions()
        options.asyncOp = False
        self._run(lambda: self.group._reduce_scatter_base(out, flat, options))
        return out.view(x.shape[1:])

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        sent, received = counts[self.group.rank()], [row[self.group.rank()] for row in counts]
        out = x.new_empty(sum(received), *x.shape[1:])
        options = AllToAllOptions()
        options.asyncOp = False
        self._run(lambda: self.group.alltoall_base(out, x.contiguous(), received, list(sent), options))
        return out

    def abort(self, reason: str) -> None:
        """Abort NCCL in a separate thread. Its kernels end at once, but the call blocks until no CUDA graph holds a
        collective (`commDestroySync`). A wait in gloo ends when the other rank's connection ends, or at its timeout."""
        threading.Thread(target=self.group.abort, name="abort", daemon=True).start()

    def close(self) -> None:
        """Do nothing: connections close with the last reference."""

    def _run(self, collective: Callable[[], dist.Work | None]) -> None:
        try:
            work = collective()
            if work is not None:  # None if it runs in the caller's stream
                work.wait()
        except RuntimeError as error:
            raise EngineUnavailable(f"a collective failed, perhaps because another rank has died: {error}") from error


def gloo(store: dist.Store, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()  # the only way to choose the network interface
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    group = kind(store, rank, size, options)
    group._set_default_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    return group


def nccl(store: dist.Store, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    return dist.ProcessGroupNCCL(store, rank, size, options)
