"""The KV cache of a rank as bytes that transports read and write."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kv_transfer.transport.base import CacheLayout, Region, runs

Bytes = NDArray[np.uint8]
WORDS = (torch.complex128, torch.int64, torch.uint8)  # a GPU's indexed copy moves one element per thread


class BlockMemory:
    """KV cache of one rank, viewed as [num_blocks, slabs, heads, head_bytes].

    cache: [num_blocks, layers, parts, kv_heads, block_size, head_dim], contiguous, on any device.
    """

    def __init__(self, cache: Tensor):
        num_blocks, layers, parts, heads, block_size, head_dim = cache.shape
        head_bytes = block_size * head_dim * cache.element_size()
        self.layout = CacheLayout(num_blocks, layers * parts, heads, head_bytes)
        self.device = cache.device
        self.tensor = cache.view(torch.uint8).view(num_blocks, layers * parts, heads, head_bytes)
        self._stream: Any = None  # separate, so that copies and computing steps do not wait for each other
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # where the cache is filled with zeros
            self._words = self._in_words(self.tensor)
        else:
            # numpy, because torch would start a thread pool for every thread that copies
            self._array: Bytes = self.tensor.numpy()
            self._flat = self._array.reshape(-1).data
        self.needs_context = self.device.type == "cuda"
        self._thread = threading.local()

    def enter_thread(self) -> None:
        """Give the calling thread the CUDA context of the memory's device.

        Torch does this in each of its calls. Libraries that get only the memory's address do not.
        """
        if self.needs_context and not hasattr(self._thread, "entered"):
            torch.cuda.set_device(self.device)
            self._stream.record_event()
            self._thread.entered = True

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Run this thread's GPU work on the memory's own stream.

        Code outside torch can write to tensors made inside as soon as they exist. A shared stream would make the
        model's steps wait for a peer, and copies wait for steps.
        """
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def direct(self, region: Region) -> bool:
        """Return whether a region is whole blocks of host memory, which sockets can read and write."""
        return self._stream is None and region == self.layout.whole

    def views(self, blocks: list[int]) -> list[memoryview]:
        """Return the memory of whole blocks, one view for each run of adjacent blocks. Requires `direct`."""
        size = self.layout.block_bytes
        return [self._flat[blocks[i] * size : (blocks[i] + n) * size] for i, n in runs(blocks)]

    def gather(self, blocks: list[int], region: Region) -> Bytes:
        """Copy a region of the blocks to host memory. Returns [len(blocks) * slabs * heads * head_bytes]."""
        heads, slabs = slices(region)
        if self._stream is not None:
            with self.apart():
                index = torch.tensor(blocks, device=self.device)
                found_words = self._words[index, slabs, heads].reshape(-1)
                copied = found_words.to("cpu", non_blocking=True)  # into pinned memory
                self._stream.synchronize()
            found: Bytes = copied.view(torch.uint8).numpy()
            return found
        out = np.empty((len(blocks), region.slabs, region.heads, self.layout.head_bytes), np.uint8)
        for i, n in runs(blocks):
            out[i : i + n] = self._array[blocks[i] : blocks[i] + n, slabs, heads]
        return out.reshape(-1)

    def scatter(self, blocks: list[int], region: Region, data: Bytes | Tensor) -> None:
        """Write data in the format of `gather` to the cache.

        data: [len(blocks) * slabs * heads * head_bytes] uint8, in host memory or on the cache's device.
        """
        heads, slabs = slices(region)
        shape = (len(blocks), region.slabs, region.heads, self.layout.head_bytes)
        if self._stream is None:
            source = np.asarray(data).reshape(shape)
            for i, n in runs(blocks):
                self._array[blocks[i] : blocks[i] + n, slabs, heads] = source[i : i + n]
            return
        with self.apart():
            index = torch.tensor(blocks, device=self.device)
            self._words[index, slabs, heads] = self._in_words(torch.as_tensor(data, device=self.device).view(shape))
        self._stream.synchronize()

    def _in_words(self, data: Tensor) -> Tensor:
        """View bytes [..., head_bytes] as the largest word type that divides head_bytes."""
        return data.view(next(word for word in WORDS if self.layout.head_bytes % word.itemsize == 0))


def slices(region: Region) -> tuple[slice, slice]:
    """Return the heads and the slabs of a region."""
    return slice(region.head, region.head + region.heads), slice(region.slab, region.slab + region.slabs)
