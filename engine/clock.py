"""Where an engine gets its time from."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """The two clocks of a machine. A simulation passes its own (tests/days)."""

    monotonic: Callable[[], float] = time.monotonic
    """Returns seconds since an unknown moment; never goes backwards."""
    wall: Callable[[], float] = time.time
    """Returns seconds since 1970."""


SYSTEM_CLOCK = Clock()
