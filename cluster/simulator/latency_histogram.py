"""Times between tokens: too many to keep, so they are counted by size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

PER_DOUBLING = 32  # so that a value is known to 1 percent
SMALLEST_S = 1e-6


class LatencyHistogram:
    """Counts of seconds in steps of 2 ** (1 / PER_DOUBLING)."""

    def __init__(self) -> None:
        self._counts = [0] * (40 * PER_DOUBLING)

    def add(self, seconds: float, count: int = 1) -> None:
        self._counts[self._index(seconds)] += count

    def add_steps(self, ends: Sequence[float], count: int) -> None:
        """The times between each end and the next, `count` times each; none is shorter than the one before it."""
        first, last = self._index(ends[1] - ends[0]), self._index(ends[-1] - ends[-2])
        if first == last:
            self._counts[first] += count * (len(ends) - 1)
            return
        for before, end in pairwise(ends):
            self.add(end - before, count)

    def _index(self, seconds: float) -> int:
        index = int(PER_DOUBLING * math.log2(seconds / SMALLEST_S)) if seconds > SMALLEST_S else 0
        return min(index, len(self._counts) - 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LatencyHistogram) and self._counts == other._counts

    __hash__ = None  # type: ignore[assignment]

    def __iadd__(self, other: LatencyHistogram) -> LatencyHistogram:
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        return self

    @property
    def count(self) -> int:
        return sum(self._counts)

    def percentile(self, percent: float) -> float | None:
        """Seconds; None without any."""
        total = self.count
        if not total:
            return None
        index = int(np.searchsorted(np.cumsum(self._counts), percent / 100 * total))
        return SMALLEST_S * float(2 ** ((min(index, len(self._counts) - 1) + 0.5) / PER_DOUBLING))
