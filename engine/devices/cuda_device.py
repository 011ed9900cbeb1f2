"""A GPU with CUDA."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.devices.device import Device, DeviceEvent, Run, StagedCopy, Stopwatch
from engine.devices.free_memory import FreeMemory

CHUNK_BYTES = 1 << 16
ALIGNMENT = 16  # bytes: start of every array in a staged copy, so that it can be viewed as any dtype
POLL_INTERVAL_S = 20e-6
PR_SET_TIMERSLACK = 29


class PinnedCopy(StagedCopy):
    """Arrays side by side in pinned memory, sent in one copy.

    Pinned memory must live until the copy has ended: keep this object until a later event has been reached.
    """

    def __init__(self, torch_device: torch.device):
        self._torch_device = torch_device
        self._chunks: list[tuple[Tensor, Tensor]] = []  # on the host, on the device
        self._used: list[int] = []  # bytes used of each chunk
        self._views: dict[np.dtype[Any], tuple[NDArray[Any], Tensor]] = {}  # views of the last chunk, by dtype

    def add(self, array: NDArray[Any]) -> Tensor:
        start = -(-self._used[-1] // ALIGNMENT) * ALIGNMENT if self._used else 0
        if not self._chunks or start + array.nbytes > self._chunks[-1][0].numel():
            self._open(max(CHUNK_BYTES, array.nbytes))
            start = 0
        self._used[-1] = start + array.nbytes
        views = self._views.get(array.dtype)
        if views is None:
            host, remote = self._chunks[-1]
            values = host.numpy().view(array.dtype)
            views = self._views[array.dtype] = values, remote.view(torch.from_numpy(values).dtype)
        first = start // array.itemsize
        views[0][first : first + array.size] = array.reshape(-1)
        added = views[1][first : first + array.size]
        return added if array.ndim == 1 else added.view(array.shape)

    def send(self) -> None:
        for (host, remote), used in zip(self._chunks, self._used, strict=True):
            remote[:used].copy_(host[:used], non_blocking=True)

    def _open(self, size: int) -> None:
        size = -(-size // ALIGNMENT) * ALIGNMENT
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self._torch_device.type == "cuda")
        self._chunks.append((host, torch.empty(size, dtype=torch.uint8, device=self._torch_device)))
        self._used.append(0)
        self._views.clear()


class CudaEvent(DeviceEvent):
    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def reached(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self._event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_INTERVAL_S)
        return True


class CudaDevice(Device):
    """One GPU: the current one of the thread that creates this object."""

    asynchronous = True

    def __init__(self) -> None:
        # with its index, since "cuda" alone means the thread's current device, which may be another one
        super().__init__(torch.device("cuda", torch.cuda.current_device()))
        sleep_precisely()
        self._pool: Any = None  # memory shared by all graphs, since only one of them runs at a time
        self._stream: Any = None
        self._beside: Any = None

    def set_current(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def staged_copy(self) -> StagedCopy:
        return PinnedCopy(self.torch_device)

    def fetch(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=True)  # into pinned memory, since it does not block

    def event(self) -> DeviceEvent:
        return CudaEvent()

    def capture(self, run: Run) -> tuple[Tensor, Callable[[], None], Callable[[], None]]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.torch_device)  # the default stream cannot be captured
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream(self.torch_device)
        try:
            # thread_local: other threads, which move KV or watch NCCL, may call CUDA meanwhile
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                output = run()
        finally:
            torch.cuda.set_stream(before)  # torch leaves its own stream current when a capture fails
        return output, graph.replay, graph.reset

    def beside(self) -> AbstractContextManager[Any]:
        """Use a stream of its own."""
        if self._beside is None:
            self._beside = torch.cuda.Stream(self.torch_device)
        return torch.cuda.stream(self._beside)

    def stopwatch(self) -> Stopwatch:
        """Measure by events in the queue, without waiting."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()

        def stop() -> Callable[[], float]:
            end.record()
            return lambda: start.elapsed_time(end) / 1000

        return stop

    def free_memory(self) -> FreeMemory:
        free, _ = torch.cuda.mem_get_info()
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return FreeMemory(free + unused, "the GPU's memory")

    def used_bytes(self) -> int:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()  # memory that torch keeps for later does not count as used
        return torch.cuda.memory_reserved(self.torch_device)


def sleep_precisely() -> None:
    """Let this thread, and threads that it starts, sleep only as long as they ask to. Otherwise Linux adds up to 50 µs
    to each wait, which would delay every step in `CudaEvent.reached`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
