"""KV blocks of a rank as bytes, on the device and in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]


class DeviceBlocks:
    """The blocks of all KV cache groups on the device. All layers of a block lie side by side.

    On a GPU, copies run on a stream of their own, through pinned memory. A copy first waits for all work that steps
    have queued on the GPU before it.
    """

    def __init__(self, caches: Sequence[Tensor]):
        """caches: one per KV cache group, [num_blocks, ...], contiguous; the cache of recurrent states comes last."""
        self._rows = [cache.flatten(1).view(torch.uint8) for cache in caches]
        self.device = caches[0].device
        self._stream: Any = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        # numpy, because torch would start a thread pool for every thread that copies
        self._arrays: list[Bytes] = [] if self._stream else [rows.numpy() for rows in self._rows]

    @property
    def block_bytes(self) -> list[int]:
        """Bytes of one block of each group."""
        return [rows.shape[1] for rows in self._rows]

    def buffer(self, group: int, count: int = 1) -> Tensor:
        """Return host memory for `count` blocks of a group, [count, bytes] uint8."""
        size = self._rows[group].shape[1]
        return torch.empty(count, size, dtype=torch.uint8, pin_memory=self._stream is not None)

    def read(self, group: int, block: int, into: Tensor) -> None:
        """Start to copy a block to host memory. The copy is complete after `finish`."""
        if self._stream is None:
            into.numpy()[:] = self._arrays[group][block]
            return
        self._stream.wait_stream(torch.cuda.default_stream(self.device))
        with torch.cuda.stream(self._stream):
            into.copy_(self._rows[group][block], non_blocking=True)

    def write(self, group: int, block: int, source: Tensor | bytes) -> None:
        """Copy a block from host memory to the device, and wait until the copy is complete."""
        if self._stream is None:
            array = source.numpy() if isinstance(source, Tensor) else np.frombuffer(source, dtype=np.uint8)
            self._arrays[group][block] = array
            return
        if isinstance(source, bytes):
            pinned = self.buffer(group)[0]
            pinned.numpy()[:] = np.frombuffer(source, dtype=np.uint8)
            source = pinned
        self._stream.wait_stream(torch.cuda.default_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._rows[group][block].copy_(source, non_blocking=True)
        self._stream.synchronize()

    def finish(self) -> None:
        """Wait for all copies started by `read`."""
        if self._stream is not None:
            self._stream.synchronize()

    def current(self) -> Any:
        """Return a context in which the blocks' device is the current device of the calling thread."""
        return nullcontext() if self._stream is None else torch.cuda.device(self.device)
