"""Arrival times of requests, for load tests and simulations."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, request_rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Return ascending arrival times in seconds from the start; all 0 for an infinite rate.

    request_rate: requests per second. burstiness: shape of the gamma distribution of the gaps; 1 is a Poisson process;
    with smaller values, requests arrive in bursts. As in vLLM's bench, the times are scaled so that the last request is
    sent at count / request_rate; otherwise runs of a few hundred requests could not be compared.
    """
    if math.isinf(request_rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (request_rate * burstiness), count)
    times = np.cumsum(gaps)
    if times[-1] > 0:  # 0 if a tiny burstiness rounds all gaps to 0
        times *= count / request_rate / times[-1]
    return list(times.tolist())
