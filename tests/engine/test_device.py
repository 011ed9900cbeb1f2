"""What a GPU needs of the host."""

from __future__ import annotations

import ctypes
import sys
import threading

import pytest

from engine.device import sleep_precisely

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
