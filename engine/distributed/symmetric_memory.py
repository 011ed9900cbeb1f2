"""All-reduce over memory that the GPUs of one machine map of each other: torch's symmetric memory.

Each GPU reads the others' addends itself, over NVLink: small tensors in one kernel that copies, adds and writes the
result, larger ones in parts, which NVLink's switch adds up where it can. NCCL takes more hops, which counts for the
tensors of decode steps; it keeps what is larger than the buffer. The kernels are torch's, and can be captured in a CUDA
graph. They wait for the other ranks on the device, and nothing ends that wait when one dies but the end of the process.

This has not run on a GPU yet. Names of `torch._C` as in torch 2.11 to 2.14.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from engine.distributed.collectives import Collectives

#: Ranks whose larger sums NVLink's switch makes, by the major compute capability; fewer read as much from the switch.
#: As vLLM measured (device_communicators/symm_mem.py); its 6 ranks are not among SIZES.
MULTICAST_SIZES = {9: (4, 8), 10: (8,)}
SIZES = (2, 4, 8)  # ranks whose addends the kernels add in the same order on each
DTYPES = (torch.bfloat16, torch.float32)
ALIGNMENT = 16  # bytes
ONE_SHOT_BYTES = 256 << 10  # at most, where every rank reads all of every other's
BUFFER_BYTES = 16 << 20


class SymmetricMemory:
    """All-reduces by symmetric memory, and the rest by `plain`."""

    def __init__(self, plain: Collectives, buffer: Tensor, name: Any, multicast: bool, ops: Any):
        """buffer: [bytes] uint8, mapped by all ranks of the process group `name`. multicast: NVLink's switch can add.
        ops: torch.ops.symm_mem, or what stands for it."""
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

    def check(self, rank: int) -> str:
        """Compare some sums with plain ones; return which torch refuses or gets wrong, or nothing. Every rank computes
        all of them, since others wait for it: for ever, if it dies."""
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
        """Give back the buffer, and leave `plain` open."""
        c10d._unregister_process_group(self._name)

    def close(self) -> None:
        self.release()
        self._plain.close()


def open_symmetric_memory(
    plain: Collectives, nccl: Any, store: Any, rank: int, size: int, name: Any
) -> SymmetricMemory:
    """Map the buffers of all ranks, which call this together. nccl: the ProcessGroupNCCL of `plain`. name: of this
    group in the process. Raises RuntimeError, on any rank or on some."""
    device = torch.device("cuda", torch.cuda.current_device())
    group = c10d.ProcessGroup(store, rank, size)
    group._set_default_backend(c10d.ProcessGroup.BackendType.NCCL)
    group._register_backend(device, c10d.ProcessGroup.BackendType.NCCL, nccl)
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
