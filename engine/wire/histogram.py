"""Counts of values by size, as Prometheus has them. Pure Python, cheap enough for every token."""

from __future__ import annotations

from bisect import bisect_left

import msgspec


def _one_two_five(first: int, last: int) -> list[float]:
    """1, 2 and 5 times every power of ten from 10**first up to 10**last."""
    return [*(m * 10.0**e for e in range(first, last) for m in (1, 2, 5)), 10.0**last]


SECONDS = _one_two_five(-3, 3)
TOKENS = _one_two_five(0, 6)


class Histogram(msgspec.Struct, array_like=True):
    """bounds: upper ends of the buckets, rising; a value equal to one belongs below it.
    counts: one per bucket, and one more for what is above them all. Not cumulative."""

    bounds: list[float]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def over(cls, bounds: list[float]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)
