"""Repeats each launch of a CPU kernel with its arrays at other addresses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engine.model.ops.cpu.kernel import CpuKernel, recorder

PLACES = 6  # of the arrays of each launch
ALIGNMENT = 4  # bytes; arrays of int64 have 8
LARGEST_GAP = 64  # bytes between two arrays
LARGEST = 1 << 22  # bytes of the arrays of a launch that is repeated


@contextmanager
def moved_kernels(seed: int = 0) -> Iterator[set[CpuKernel]]:
    """Repeat each launch while in this context. Yields the kernels that were repeated. A launch raises AssertionError
    if an array has other bits after a repetition."""
    launch, rng, repeated = CpuKernel.launch, random.Random(seed), set[CpuKernel]()

    def launch_and_repeat(kernel: CpuKernel, dtype: torch.dtype, items: int, *args: Tensor | int) -> None:
        arrays = {arg.untyped_storage().data_ptr(): arg for arg in args if isinstance(arg, Tensor)}
        before = {address: content(array).clone() for address, array in arrays.items()}
        launch(kernel, dtype, items, *args)
        if recorder.graph is not None or sum(map(len, before.values())) > LARGEST:
            return
        repeated.add(kernel)
        for _ in range(PLACES):
            memory, starts = place(rng, arrays, before)
            moved = [
                memory.data_ptr() + starts[arg.untyped_storage().data_ptr()] + arg.storage_offset() * arg.itemsize
                if isinstance(arg, Tensor)
                else arg
                for arg in args
            ]
            launch(kernel, dtype, items, *moved)
            for address, start in starts.items():
                there = memory[start : start + len(before[address])]
                assert torch.equal(there, content(arrays[address])), (kernel.entries[dtype], dtype, args, starts)

    with_launch: Any = CpuKernel
    with_launch.launch = launch_and_repeat
    try:
        yield repeated
    finally:
        with_launch.launch = launch


def content(array: Tensor) -> Tensor:
    """Return all bytes of the memory that the array is a part of."""
    return torch.empty(0, dtype=torch.uint8).set_(array.untyped_storage())


def place(rng: random.Random, arrays: dict[int, Tensor], contents: dict[int, Tensor]) -> tuple[Tensor, dict[int, int]]:
    """Copy the contents to one memory, in a random order with random gaps. Returns the memory and where each begins."""
    starts, end = {}, 0
    for address in rng.sample(list(contents), len(contents)):
        step = 8 if arrays[address].dtype == torch.int64 else ALIGNMENT
        end = -(-(end + rng.randrange(0, LARGEST_GAP, ALIGNMENT)) // step) * step
        starts[address] = end
        end += len(contents[address])
    memory = torch.zeros(end, dtype=torch.uint8)
    for address, start in starts.items():
        memory[start : start + len(contents[address])] = contents[address]
    return memory, starts
