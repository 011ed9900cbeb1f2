"""The device on which a model runs: sends arrays to it, fetches results, and replays graphs.

A CPU computes at once, so there is nothing to wait for. A GPU works through a queue: the host puts copies and kernels
into it, continues, and asks later whether the queue has reached an event. Everything here uses the thread's current
stream, which is the device's default stream in every thread, so work runs in the order of the calls.
"""

from __future__ import annotations

import ctypes
import importlib
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

from engine.devices.free_memory import FreeMemory

logger = logging.getLogger(__name__)

NICE = 10  # of threads that work beside the steps

MALLOPTS = {-1: 2**30, -3: 2**25}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD (its maximum): mallopt(3)

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

    def free_memory(self) -> FreeMemory:
        """Return what this process can still take of the device's memory."""
        free: FreeMemory = importlib.import_module(".host_memory", __package__).free_host_memory()
        return free

    def used_bytes(self) -> int:
        """Return how much of the device's memory this process has taken, since others may share the device. What CUDA
        itself keeps for its context and for graphs does not count."""
        return 0


def copy_to(values: ArrayLike, torch_device: torch.device) -> Tensor:
    """Copy values to a device through pinned memory. With any other memory, the host would have to wait for the
    copy."""
    host = torch.from_numpy(np.asarray(values))
    if torch_device.type == "cuda":
        host = host.pin_memory()  # torch keeps it until the copy has ended
    return host.to(torch_device, non_blocking=True)


def is_gpu(name: str) -> bool:
    """Return whether `auto`, `cpu` or `cuda` means a GPU on this machine."""
    return name == "cuda" or (name == "auto" and torch.cuda.is_available())


def open_device(name: str) -> Device:
    """Return the device named `auto`, `cpu` or `cuda`."""
    if is_gpu(name):
        gpu: Device = importlib.import_module(".cuda_device", __package__).CudaDevice()
        return gpu
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
