"""All-reduce over memory that the GPUs of one machine map from each other: torch's symmetric memory.

Each GPU reads the others' addends itself over NVLink. Small tensors take one kernel, which copies, adds and writes the
result. Larger tensors are summed in parts, by NVLink's switch where it can. NCCL takes more hops, which matters for the
small tensors of decode steps; it still sums tensors larger than the buffer. The kernels are torch's, and can be
captured in a CUDA graph. They wait for the other ranks on the device. If a rank dies, this wait ends only with the
process.

Names of `torch._C` as in torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from engine.distributed.process_group import Collectives, ProcessGroup

#: Numbers of ranks for which NVLink's switch makes larger sums, by major compute capability; with fewer ranks it saves
#: no traffic. From vLLM's measurements (device_communicators/symm_mem.py), without 6 ranks, which SIZES lacks.
MULTICAST_SIZES = {9: (4, 8), 10: (8,)}
SIZES = (2, 4, 8)  # numbers of ranks for which the kernels add in the same order on every rank
DTYPES = (torch.bfloat16, torch.float32)
ALIGNMENT = 16  # bytes
ONE_SHOT_BYTES = 256 << 10  # up to this size every rank reads the whole tensors of all others
BUFFER_BYTES = 16 << 20


class SymmetricMemory:
    """All-reduce over symmetric memory. Everything else is left to `plain`."""

    def __init__(self, plain: Collectives, buffer: Tensor, name: Any, multicast: bool, ops: Any):
        """buffer: [bytes] uint8, mapped by all ranks of the process group `name`.
        multicast: whether NVLink's switch can sum the ranks' tensors.
        ops: torch.ops.symm_mem, or a substitute."""
        self._plain, self._buffer, self._name, self._ops = plain, buffer, name, ops
        self._in_parts = ops.multimem_all_reduce_ if multicast else ops.two_shot_all_reduce_

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if x.dtype not in DTYPES or x.nbytes % ALIGNMENT or not 0 < x.nbytes <= self._buffer.nbytes:
            return self._plain.all_reduce(x)
        shared = self._buffer[: x.nbytes].view(x.dtype)
        if x.nbytes <= ONE_SHOT_BYTES:
            total: Tensor = self._ops.one_shot_all_reduce_copy(shared, x.view(-1), "sum", self._name)
            return total.view(x.shape)
        shared.copy_(x.view(-1))
        self._in_parts(shared, "sum", self._name)
        return x.copy_(shared.view(x.shape))

    def all_gather(self, x: Tensor) -> Tensor:
        return self._plain.all_gather(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._plain.reduce_scatter(x)

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        return self._plain.all_to_all(x, counts)

    def check(self, rank: int) -> str:
        """Compare some sums with those of `plain`. Returns a description of all sums that failed or are wrong, or "".
        A rank computes all sums even after an error, since the other ranks wait for it. They would wait forever for a
        dead rank."""
        if self._buffer.is_cuda:
            torch.cuda.set_device(self._buffer.device)  # each thread has its own
        wrong = []
        for dtype in DTYPES:
            for size in (ALIGNMENT, ONE_SHOT_BYTES, ONE_SHOT_BYTES + ALIGNMENT, self._buffer.nbytes):
                x = torch.arange(size // dtype.itemsize, device=self._buffer.device) % 13 * (rank + 1)
                x = x.to(dtype)  # whole numbers, whose sums are exact
                expected = self._plain.all_reduce(x.clone())
                try:
                    total = self.all_reduce(x)
                except RuntimeError as error:
                    wrong.append(f"the sum of {size} bytes of {dtype} failed: {error}")
                    continue
                if not torch.equal(total, expected):
                    wrong.append(f"the sum of {size} bytes of {dtype} is wrong")
        return ", ".join(wrong)

    def abort(self, reason: str) -> None:
        self._plain.abort(reason)

    def release(self) -> None:
        """Free the buffer, but leave `plain` open."""
        c10d._unregister_process_group(self._name)

    def close(self) -> None:
        self.release()
        self._plain.close()


def open_symmetric_memory(plain: ProcessGroup, store: Any, rank: int, size: int, name: Any) -> SymmetricMemory:
    """Map the buffers of all ranks, which must call this together. Raises RuntimeError, on all ranks or only on some.
    plain: collectives of NCCL. name: unique name of this group in the process."""
    device = torch.device("cuda", torch.cuda.current_device())
    group = c10d.ProcessGroup(store, rank, size)
    group._set_default_backend(c10d.ProcessGroup.BackendType.NCCL)
    group._register_backend(device, c10d.ProcessGroup.BackendType.NCCL, plain.group)
    group._set_group_name(name)
    c10d._register_process_group(name, group)  # where torch's operations look it up
    try:
        c10d._SymmetricMemory.set_group_info(name, rank, size, store)
        buffer = c10d._SymmetricMemory.empty_strided_p2p((BUFFER_BYTES,), (1,), torch.uint8, device, name)
        mapped: Any = c10d._SymmetricMemory.rendezvous(buffer, name)
        multicast = mapped.multicast_ptr != 0 and size in MULTICAST_SIZES.get(torch.cuda.get_device_capability()[0], ())
        return SymmetricMemory(plain, buffer, name, multicast, torch.ops.symm_mem)
    except BaseException:
        c10d._unregister_process_group(name)
        raise
