"""Limits of what a process spends on a tape, which may come from anybody: a scheduler that is not in a state of its own
may do the same for ever, or take all memory."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

MOMENT_S = 20.0  # of CPU time, at least, for one moment of a tape; at most twice as long
SPARE_BYTES = 2**31  # of memory, besides what the process has
BYTES_OF_BYTE = 64  # of memory, for each byte of tapes


class TapeTooExpensive(Exception):
    """A moment of a tape takes too long."""


class Watched:
    """What a replay is doing now, as long as it is inside one call of a scheduler."""

    moment: Any = None
    """None while nothing is replayed."""


WATCHED = Watched()


@contextmanager
def watched(moment: Any) -> Iterator[None]:
    """Tell what is replayed inside the block."""
    WATCHED.moment = moment
    try:
        yield
    finally:
        WATCHED.moment = None


@contextmanager
def replay_limits(num_bytes: int) -> Iterator[None]:
    """Inside the block, raise TapeTooExpensive if a moment of a tape takes too long, and MemoryError if the process
    needs too much memory. For the main thread. num_bytes: of the tapes."""
    before: Any = None

    def look(signum: int, frame: FrameType | None) -> None:
        nonlocal before
        if WATCHED.moment is not None and WATCHED.moment is before:
            raise TapeTooExpensive(f"a moment takes more than {MOMENT_S:g} s")
        before = WATCHED.moment

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = memory_of_process() + SPARE_BYTES + BYTES_OF_BYTE * num_bytes
    handler = signal.signal(signal.SIGPROF, look)
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard))
    signal.setitimer(signal.ITIMER_PROF, MOMENT_S, MOMENT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def memory_of_process() -> int:
    """Return the bytes of addresses that this process uses."""
    statm = Path("/proc/self/statm")
    if not statm.exists():  # not Linux
        return 2**40
    return int(statm.read_text().split()[0]) * resource.getpagesize()
