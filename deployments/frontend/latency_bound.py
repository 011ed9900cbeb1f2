"""Upper bounds of latencies, from how far off earlier expectations were. Pure: no clock."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

COVERAGE = 0.9  # share of latencies that are to be within their bounds
MEMORY = 512  # newest outcomes that count
STEP = 0.02  # by which one outcome moves the level
ROUNDING = 1e-9


class LatencyBound:
    """Bounds a latency by what was expected, times a quantile of the newest ratios of what came to what was expected.

    Conformal prediction, with a level that follows the outcomes (Gibbs and Candès, Adaptive Conformal Inference Under
    Distribution Shift, 2021): each latency beyond its bound raises later bounds, each one within lowers them. So of any
    n latencies, at most (1 - COVERAGE) * n + 6 are beyond their bounds, whatever they are, if each is known before the
    next bound is told. The level has a limit: latencies that are all alike do not lower the bound below themselves.
    """

    def __init__(self) -> None:
        self._level = 1 - COVERAGE  # share of the ratios that are to be above the bound
        self._newest: deque[float] = deque()
        self._ratios: list[float] = []  # the same, in order

    @property
    def ratio(self) -> float:
        """The bound of a latency divided by what is expected; infinite if too little is known, or if so many latencies
        were late that the largest ratio is no bound."""
        rank = math.ceil((1 - self._level) * (len(self._ratios) + 1))
        return self._ratios[rank - 1] if rank <= len(self._ratios) else math.inf

    def observe(self, expected_s: float, actual_s: float, bound_s: float) -> bool:
        """Record a latency, and the bound that was told for it. Returns whether it was within the bound."""
        within = actual_s <= bound_s * (1 + ROUNDING)
        self._level = min(2 * (1 - COVERAGE), self._level + STEP * (1 - COVERAGE - (not within)))
        ratio = actual_s / expected_s
        self._newest.append(ratio)
        insort(self._ratios, ratio)
        if len(self._newest) > MEMORY:
            del self._ratios[bisect_left(self._ratios, self._newest.popleft())]
        return within
