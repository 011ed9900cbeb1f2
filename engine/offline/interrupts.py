"""Ctrl-C between two steps of an engine, and not within one, after which the engine could not go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Let Ctrl-C wait until the end of the block; the second one does not wait. A handler of the user's is left alone,
    and so are threads, which Ctrl-C never interrupts."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            signal.default_int_handler(number, frame)
        came = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
