"""Summary statistics of measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Distribution:
    """Summary of measurements. Percentiles interpolate linearly, as in numpy and vLLM's bench."""

    mean: float
    median: float
    min: float
    max: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """Return the summary of some values; None if there are none."""
        if not len(values):
            return None
        low, median, p90, p99, high = np.percentile(values, [0, 50, 90, 99, 100]).tolist()
        return cls(mean=float(np.mean(values)), median=median, min=low, max=high, p90=p90, p99=p99)
