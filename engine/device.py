"""The device on which a model runs: sends arrays to it, fetches results, and replays graphs.

A CPU computes at once, so there is nothing to wait for. A GPU works through a queue: the host puts copies and kernels
into it, continues, and asks later whether the queue has reached an event. Everything here uses the thread's current
stream, which is the device's default stream in every thread, so work runs in the order of the calls.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from engine.amx_permission import may_use_amx

logger = logging.getLogger(__name__)

NICE = 10  # of threads that work beside the steps

CHUNK_BYTES = 1 << 16
ALIGNMENT = 16  # bytes: start of every array in a staged copy, so that it can be viewed as any dtype
POLL_INTERVAL_S = 20e-6
MALLOPTS = {-1: 2**30, -3: 2**25}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD (its maximum): mallopt(3)
PR_SET_TIMERSLACK = 29

Run = Callable[[], Tensor]
Stopwatch = Callable[[], Callable[[], float]]
T = TypeVar("T")


class StagedCopy:
    """Small arrays to copy to the device. `add` returns a tensor at once, which holds the values after `send`."""

    def add(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array)

    def send(self) -> None:
        """Put the copies into the device's queue. Called once."""


class DeviceEvent:
    """A point in the device's queue, after everything queued before the event was made."""

    def wait(self) -> None:
        """Return once the device has reached the event."""

    def reached(self, timeout_s: float) -> bool:
        """Return whether the device reaches the event within `timeout_s`."""
        return True


class Device:
    """A CPU, and the common interface of all devices."""

    asynchronous = False  #: whether calls return before their work is done

    def __init__(self, torch_device: torch.device):
        self.torch_device = torch_device

    def set_current(self) -> None:
        """Make this the calling thread's current device. Every thread must do so before it launches work."""

    def begin_background(self) -> None:
        """Prepare the calling thread for work beside the steps, which keep the cores."""
        self.set_current()
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

    def staged_copy(self) -> StagedCopy:
        return StagedCopy()

    def fetch(self, tensor: Tensor) -> Tensor:
        """Copy `tensor` to host memory. Its values are valid once an event made later has been reached."""
        return tensor

    def event(self) -> DeviceEvent:
        return DeviceEvent()

    def capture(self, run: Run) -> tuple[Tensor, Callable[[], None], Callable[[], None]]:
        """Capture `run` as a graph; it must have run before on the same tensors. Returns the graph's output, a function
        that replays the graph, and a function that destroys it. The output has no defined values before the first
        replay."""
        raise NotImplementedError("a CPU has no graphs")

    def beside(self) -> AbstractContextManager[Any]:
        """Return a context in which the thread's work does not wait for the device's queue, nor the queue for it."""
        return nullcontext()

    def timed(self, run: Callable[[], T]) -> tuple[T, Callable[[], float]]:
        """Return the output of `run`, and a function that returns the seconds that it took on the device. Call the
        function once an event made later has been reached."""
        watch = self.stopwatch()
        return run(), watch()

    def stopwatch(self) -> Stopwatch:
        """Start to measure time. Returns a function that ends this, and returns a function as `timed` does."""
        started = time.perf_counter()

        def stop() -> Callable[[], float]:
            seconds = time.perf_counter() - started
            return lambda: seconds

        return stop

    def used_bytes(self) -> int:
        """Return how much of the device's memory this process has taken, since others may share the device. What CUDA
        itself keeps for its context and for graphs does not count."""
        return 0


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

    def used_bytes(self) -> int:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()  # memory that torch keeps for later does not count as used
        return torch.cuda.memory_reserved(self.torch_device)


def copy_to(values: ArrayLike, torch_device: torch.device) -> Tensor:
    """Copy values to a device through pinned memory. With any other memory, the host would have to wait for the
    copy."""
    host = torch.from_numpy(np.asarray(values))
    if torch_device.type == "cuda":
        host = host.pin_memory()  # torch keeps it until the copy has ended
    return host.to(torch_device, non_blocking=True)


def sleep_precisely() -> None:
    """Let this thread, and threads that it starts, sleep only as long as they ask to. Otherwise Linux adds up to 50 µs
    to each wait, which would delay every step in `CudaEvent.reached`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def is_gpu(name: str) -> bool:
    """Return whether `auto`, `cpu` or `cuda` means a GPU on this machine."""
    return name == "cuda" or (name == "auto" and torch.cuda.is_available())


def kind_of(torch_device: torch.device) -> str:
    """Return the model of a GPU, or the CPU's model with the instructions that kernels use. On another kind, kernels
    may round differently."""
    if torch_device.type == "cuda":
        return torch.cuda.get_device_name(torch_device)
    instructions = torch.backends.cpu.get_cpu_capability()
    if not numba_found():
        return instructions
    from llvmlite.binding import get_host_cpu_name

    return f"{get_host_cpu_name()} {instructions}{' AMX' if may_use_amx() else ''}"


def open_device(name: str) -> Device:
    """Return the device named `auto`, `cpu` or `cuda`."""
    if is_gpu(name):
        return CudaDevice()
    keep_freed_memory()
    return Device(torch.device("cpu"))


def keep_freed_memory() -> None:
    """Make glibc keep the memory freed by one step for the next. By default glibc returns the memory to the system.
    Getting it back page by page took a tenth of the time to compute a prompt."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for option, size in MALLOPTS.items():
            mallopt(option, size)


@cache
def numba_found() -> bool:
    """Return whether numba can be imported, with a warning if not."""
    try:
        import numba  # noqa: F401
    except ImportError as error:  # also raised when numba was built for another numpy
        installed = importlib.util.find_spec("numba") is not None
        why = f"cannot be imported ({error})" if installed else "is not installed"
        logger.warning("numba %s, so plain torch is used, which is several times slower on a CPU", why)
        return False
    return True
