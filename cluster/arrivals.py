"""Arrival times of requests: of a load test, and of a simulation."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, request_rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Return ascending seconds from the start; all 0 for an infinite rate.

    request_rate: per second.
    burstiness: shape of the gamma distribution of the gaps: 1 is a Poisson process, less comes in bursts.

    All is then scaled, as in vLLM's bench, so that the last request is sent at count / request_rate: runs of a few
    hundred requests could not be compared otherwise.
    """
    if math.isinf(request_rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (request_rate * burstiness), count)
    times = np.cumsum(gaps)
    if times[-1] > 0:  # all gaps can round to nothing when the burstiness is tiny
        times *= count / request_rate / times[-1]
    return list(times.tolist())
