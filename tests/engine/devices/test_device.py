"""What a device needs of the host."""

from __future__ import annotations

import ctypes
import resource
import statistics
import sys
import threading

import pytest
import torch

from engine.devices.cuda_device import sleep_precisely
from engine.devices.device import open_device

PR_GET_TIMERSLACK = 30


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such call")
def test_threads_that_are_started_behind_a_gpu_sleep_no_longer_than_they_ask_for():
    slack = []

    def ask() -> None:
        slack.append(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))

    def gpu() -> None:
        ask()
        sleep_precisely()
        child = threading.Thread(target=ask)
        child.start()
        child.join()

    thread = threading.Thread(target=gpu)
    thread.start()
    thread.join()
    before, after = slack
    assert after == 1 < before, "nanoseconds"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such call")
def test_memory_that_a_step_on_a_cpu_has_freed_serves_the_next_one():
    def step() -> int:
        """Make 40 MB of tensors. Returns how many pages the system had to find."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kept = [torch.ones(2_500_000) for _ in range(4)]
        del kept
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    open_device("cpu")
    for _ in range(3):  # until the heap has grown
        step()
    # the median, since once in a whole run two of ten steps had to find the pages of a tensor
    assert statistics.median(step() for _ in range(11)) < 250, "a fortieth of a step's"
