"""Records kernels once and replays them as one parallel region.

A decode step of a few sequences is a hundred short kernels. Each launch costs time in Python and torch, and time in
which threads wake up and wait for each other. In a replay, each thread goes through the whole list and takes
work from every kernel. At a kernel's end it waits only for work that other threads have taken and not finished, and
not even for that if the next kernel may run beside this one. So a thread that is not awake yet, or has lost its core to
another process, delays the others only by the work that it has taken.

A waiting thread first spins, which is fastest while cores are free. Then it yields its core, and finally it sleeps, so
that the thread for which it waits can run on that core. The time to spin adapts: it shrinks after each wait that had to
sleep, and grows after each wait for which spinning sufficed.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from engine.model.ops.cpu.kernel import I64, CpuKernel, TokenCount, as_i64, device_function, kernel, recorder

WIDTH = 40  # numbers per kernel in a graph: its arguments as packed by `CpuKernel.launch`, and at the end these three
BESIDE = WIDTH - 3  # whether the next kernel may run beside it
ENTRY, INSIDE = WIDTH - 2, WIDTH - 1  # the kernel's address, and how many threads may be working on it
MIN_SPINS, MAX_SPINS = 64, 8192  # a spin is about 10 ns
YIELDS = 64
NAP_US = 50
ALIGNMENT = 64

I64P = types.CPointer(types.int64)
sched_yield = types.ExternalFunction("sched_yield", types.int32())
usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


@intrinsic
def call(_: Any, address: Any, args: Any) -> Any:
    """Call the kernel at an address."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, a: Any) -> Any:
        entry = ir.FunctionType(ir.VoidType(), [I64.as_pointer()])
        builder.call(builder.inttoptr(a[0], entry.as_pointer()), [a[1]])
        return context.get_dummy_value()

    return types.void(types.int64, I64P), generate


@intrinsic
def add_atomic(_: Any, pointer: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, sig: Any, a: Any) -> Any:
        return builder.atomic_rmw("add", builder.gep(a[0], [a[1]]), a[2], "seq_cst")

    return types.int64(I64P, types.int64, types.int64), generate


@intrinsic
def poll(_: Any, pointer: Any, index: Any) -> Any:
    """Pause briefly, then read pointer[index], which other threads write."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, a: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            pause = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
            )
            builder.call(pause, [])
        return builder.load_atomic(builder.gep(a[0], [a[1]]), "seq_cst", 8)

    return types.int64(I64P, types.int64), generate


@device_function
def wait_for_zero(counter: Any, index: Any, waits: Any) -> None:
    """Return when counter[index] is 0. waits: how often to poll before yielding; how many waits yielded; how many
    slept."""
    spins = waits[0]
    for _ in range(spins):
        if poll(counter, index) == 0:
            waits[0] = min(spins + spins // 16, MAX_SPINS)
            return
    add_atomic(waits, 1, 1)
    for _ in range(YIELDS):
        sched_yield()
        if poll(counter, index) == 0:
            return
    add_atomic(waits, 2, 1)
    waits[0] = max(spins // 2, MIN_SPINS)
    while poll(counter, index) != 0:
        usleep(NAP_US)


@kernel
def run_all(args: Any) -> None:
    waits, running = as_i64(args[1]), 0  # the first kernel that may not be finished
    for i in range(args[3]):
        own = as_i64(args[2] + 8 * WIDTH * i)
        add_atomic(own, INSIDE, 1)
        call(own[ENTRY], own)
        add_atomic(own, INSIDE, -1)
        if own[BESIDE] == 0:
            while running <= i:
                wait_for_zero(as_i64(args[2] + 8 * WIDTH * running), INSIDE, waits)
                running += 1


RUN_ALL = CpuKernel({torch.int64: run_all})
WAITS = np.array([MAX_SPINS, 0, 0], dtype=np.int64)  # shared by all replays in this process; see `wait_for_zero`


class Memory:
    """Memory for the outputs of a graph's kernels, for up to `max_tokens` tokens. The memory of a tensor that no longer
    exists is reused.

    tokens: number of tokens in the recorded step.
    """

    def __init__(self, tokens: int, max_tokens: int) -> None:
        self._tokens, self._max_tokens = tokens, max_tokens
        self._blocks: dict[int, Tensor] = {}  # by their storages

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory. shape: [rows, ...], with the same number of rows for each token."""
        whole = self._max_tokens * shape[0] // self._tokens, *shape[1:]
        size = dtype.itemsize * math.prod(whole)
        block = min((b for b in self._blocks.values() if len(b) >= size and is_free(b)), key=len, default=None)
        if block is None:
            block = torch.empty(-(-size // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8)
            self._blocks[block.untyped_storage()._cdata] = block
        return block[:size].view(dtype).view(whole)[: shape[0]]

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._blocks


def is_free(block: Tensor) -> bool:
    storage = block.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) == 2)  # `block` and `storage`


class KernelGraph:
    """A recording of the kernels that this thread launches inside a `with` block. The kernels also run while they are
    recorded.

    A replay runs the kernels and nothing else. The tensors that they use must keep their addresses. A replay
    can have another number of tokens, up to `max_tokens`. tokens: number of tokens in the recording.
    """

    def __init__(self, tokens: int, max_tokens: int) -> None:
        self.memory = Memory(tokens, max_tokens)
        self._tokens = tokens
        self._rows: list[list[int]] = []
        self._kept: list[Tensor] = []
        self._token_counts: list[int] = []  # indices of token counts in the flattened table
        self._rows_per_token: list[int] = []  # for each of them: a kernel may take several rows for each token
        self._table, self._counts = np.empty((0, WIDTH), dtype=np.int64), np.empty((2, 0), dtype=np.int64)
        self._threads = 1
        self.is_complete = True  # each recorded kernel takes the same number of rows for each token

    def __enter__(self) -> None:
        recorder.graph = self

    def __exit__(self, *problem: Any) -> None:
        recorder.graph = None
        self._table = np.array(self._rows, dtype=np.int64).reshape(-1, WIDTH)
        self._counts = np.array([self._token_counts, self._rows_per_token], dtype=np.int64)

    def add(self, entry: int, items: int, args: tuple[Tensor | int, ...], packed: Sequence[int]) -> None:
        """Record a launch. Called by `CpuKernel.launch`."""
        padding = BESIDE - len(packed)
        assert padding >= 0, "WIDTH is too small"
        first = WIDTH * len(self._rows) + 1
        for i, arg in enumerate(args):
            if isinstance(arg, TokenCount):
                self.is_complete &= arg % self._tokens == 0
                self._token_counts.append(first + i)
                self._rows_per_token.append(arg // self._tokens)
        self._rows.append([*packed, *[0] * padding, 0, entry, 0])
        self._kept += [arg for arg in args if isinstance(arg, Tensor) and arg not in self.memory]
        self._threads = max(self._threads, items)

    def run_beside(self) -> None:
        """Let the next kernel begin before the last recorded one has ended. It must not need that kernel's results."""
        self._rows[-1][BESIDE] = 1

    def replay(self, tokens: int) -> None:
        """Run all kernels again for this number of tokens, on the current contents of their tensors."""
        self._table[:, 0] = 0
        places, rows_per_token = self._counts
        self._table.reshape(-1)[places] = tokens * rows_per_token
        RUN_ALL.launch(torch.int64, self._threads, WAITS.ctypes.data, self._table.ctypes.data, len(self._table))
