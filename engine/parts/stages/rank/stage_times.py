"""Measures how long a pipeline stage computes, and how long an engine has steps under way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

Seconds = Callable[[], float]


class BusyTime:
    """Time in which a stage computes: that of its steps, without the time in which it waits for its neighbours."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, Seconds, list[Seconds]]] = deque()
        self.total_s = 0.0

    def launched(self, step: int, whole: Seconds, waits: list[Seconds]) -> None:
        """Record a step. The functions return seconds once the device has computed the next step's inputs."""
        self._steps.append((step, whole, waits))

    def before(self, step: int) -> float:
        """Return the seconds of all steps before this one, which has ended. A GPU has recorded the times of those."""
        while self._steps and self._steps[0][0] < step:
            _, whole, waits = self._steps.popleft()
            self.total_s += max(0.0, whole() - sum(wait() for wait in waits))
        return self.total_s


class WorkingTime:
    """Time in which at least one step is under way. Used by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._steps, self._since = clock, 0, 0.0
        self.total_s = 0.0  #: until the newest step that has ended

    def begin(self) -> None:
        """Record that a step begins."""
        if not self._steps:
            self._since = self._clock()
        self._steps += 1

    def end(self) -> None:
        """Record that a step has ended."""
        now = self._clock()
        self.total_s += now - self._since
        self._since = now
        self._steps -= 1
