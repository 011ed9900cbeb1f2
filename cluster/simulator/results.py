"""What became of each request, and what that is in figures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.simulator.latency_histogram import LatencyHistogram
from cluster.simulator.spec import GoodputSlo
from cluster.simulator.trace import Trace
from engine.core.request import Request


@dataclass(frozen=True, slots=True)
class Latencies:
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: np.ndarray) -> Latencies | None:
        if not len(seconds):
            return None
        p50, p90, p99 = (1000 * np.percentile(seconds, [50, 90, 99])).tolist()
        return cls(1000 * float(seconds.mean()), p50, p90, p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCounts:
    """Of an autoscaled pool: replicas that took requests. mean: over the simulated time. wanted: the most that the
    autoscaler wanted, which are more than `most` where they were not up before the end."""

    least: int
    most: int
    mean: float
    wanted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """busy: share of the replicas' time in which they computed. replicas: at the start. gpu_hours: of all of them.
    scaled: None where their number stays."""

    replicas: int
    busy: float
    steps: int
    preemptions: int
    gpu_hours: float
    scaled: ReplicaCounts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffUse:
    """count: prompts that the prefill pool computed. link_busy: share of the time in which a prefill replica sent."""

    count: int
    gigabytes: float
    link_busy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """duration_s: until the last request ended. goodput: requests per second that kept the SLO, in the time in which
    requests came or were served. good: their share of all requests; good_ttft, good_tpot: of those that kept one half
    of it at least. hit_rate: share of prompt tokens that were cached.

    ttft_ms, tpot_ms, e2e_ms: over requests. itl_ms: over all pairs of tokens that follow each other, in classes of 2%.
    """

    trace: str
    requests: int
    completed: int
    refused: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    goodput: float
    good: float
    good_ttft: float
    good_tpot: float
    ttft_ms: Latencies | None
    tpot_ms: Latencies | None
    e2e_ms: Latencies | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    hit_rate: float
    gpus: int
    pools: dict[str, PoolUse]
    handoffs: HandoffUse | None
    took_s: float


class Results:
    """Arrays, one entry per request of the trace; nan where nothing is known. Seconds on the simulated clock."""

    def __init__(self, trace: Trace):
        self._trace = trace
        self.first_at = np.full(len(trace), np.nan)
        self.last_at = np.full(len(trace), np.nan)
        self.cached = np.zeros(len(trace), dtype=np.int64)
        self.refused = 0

    def ended(self, request: Request, late_s: float) -> None:
        """late_s: how long a token is on its way to the client."""
        index = int(request.request_id)
        assert request.first_token_at is not None and request.last_token_at is not None
        self.first_at[index] = request.first_token_at + late_s
        self.last_at[index] = request.last_token_at + late_s
        self.cached[index] = request.num_cached

    @property
    def duration_s(self) -> float:
        """Until the last request ended."""
        return max(float(np.nanmax(self.last_at, initial=0.0)), 1e-9)

    def good(self, slo: GoodputSlo) -> np.ndarray:
        """For each request, whether it kept each half of the SLO: two rows, first token and time per token."""
        ttft, tpot = self.first_at - self._trace.arrivals_s, self.tpot_s()
        done = ~np.isnan(self.last_at)
        return np.stack([done & (ttft <= slo.ttft_s), done & ~(tpot > slo.tpot_s)])

    def tpot_s(self) -> np.ndarray:
        """nan for requests of a single token."""
        intervals = (self._trace.output_tokens - 1).astype(np.float64)
        intervals[intervals == 0] = np.nan
        return (self.last_at - self.first_at) / intervals

    def report(
        self,
        slo: GoodputSlo,
        itl: LatencyHistogram,
        pools: dict[str, PoolUse],
        handoffs: HandoffUse | None,
        gpus: int,
        took_s: float,
    ) -> Report:
        trace, done = self._trace, ~np.isnan(self.last_at)
        tpot = self.tpot_s()
        duration_s = self.duration_s
        halves = self.good(slo)
        good = halves.all(axis=0)
        p50, p99 = itl.percentile(50), itl.percentile(99)
        return Report(
            trace=trace.name,
            requests=len(trace),
            completed=int(done.sum()),
            refused=self.refused,
            duration_s=duration_s,
            requests_per_s=float(done.sum()) / duration_s,
            output_tokens_per_s=float(trace.output_tokens[done].sum()) / duration_s,
            goodput=float(good.sum()) / duration_s,
            good=float(good.mean()),
            good_ttft=float(halves[0].mean()),
            good_tpot=float(halves[1].mean()),
            ttft_ms=Latencies.of((self.first_at - trace.arrivals_s)[done]),
            tpot_ms=Latencies.of(tpot[~np.isnan(tpot)]),
            e2e_ms=Latencies.of((self.last_at - trace.arrivals_s)[done]),
            itl_p50_ms=None if p50 is None else 1000 * p50,
            itl_p99_ms=None if p99 is None else 1000 * p99,
            hit_rate=float(self.cached.sum()) / max(1, int(trace.prompt_tokens[done].sum())),
            gpus=gpus,
            pools=pools,
            handoffs=handoffs,
            took_s=took_s,
        )
