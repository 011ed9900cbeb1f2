"""Means over time, and decisions that hold still. Pure Python: whoever calls brings the time, in seconds."""

from __future__ import annotations

import math
from collections import deque


class Mean:
    """Of a rate, with exponentially fading weights. The first value counts as if it had always been so."""

    def __init__(self, memory_s: float):
        self._memory_s = memory_s
        self._at: float | None = None
        self.value = 0.0

    def add(self, value: float, now: float) -> float:
        """The mean after it."""
        if self._at is None:
            self.value = value
        else:
            self.value += (value - self.value) * -math.expm1(-max(0.0, now - self._at) / self._memory_s)
        self._at = now
        return self.value


class Stabilizer:
    """Moves up to the least that was wished for during the last `up_s`, and down to the most that was wished for during
    the last `down_s`, as Kubernetes' HorizontalPodAutoscaler does."""

    def __init__(self, up_s: float, down_s: float):
        self._up_s, self._down_s = up_s, down_s
        self._history: deque[tuple[float, int]] = deque()  # (when, how many)

    def settle(self, desired: int, current: int, now: float) -> int:
        if not self._history:
            self._history.append((now, current))
        self._history.append((now, desired))
        while self._history[0][0] < now - max(self._up_s, self._down_s):
            self._history.popleft()
        up = min([desired, *(n for at, n in self._history if at > now - self._up_s)])
        down = max([desired, *(n for at, n in self._history if at > now - self._down_s)])
        return min(max(current, up), down)
