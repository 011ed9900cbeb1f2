"""Histograms like those of Prometheus, cheap enough for every token."""

from __future__ import annotations

from bisect import bisect_left

import msgspec


def _one_two_five(first: int, last: int) -> list[float]:
    """Return 1, 2 and 5 times every power of ten from 10**first up to 10**last."""
    return [*(m * 10.0**e for e in range(first, last) for m in (1, 2, 5)), 10.0**last]


SECONDS = _one_two_five(-3, 3)
TOKENS = _one_two_five(0, 6)


class Histogram(msgspec.Struct, array_like=True):
    """Number of values per bucket, and their sum."""

    bounds: list[float]
    """Upper bounds of the buckets, ascending and inclusive."""
    counts: list[int]
    """Number of values per bucket, not cumulative, then the number above all bounds."""
    sum: float = 0.0

    @classmethod
    def over(cls, bounds: list[float]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        return sum(self.counts)
