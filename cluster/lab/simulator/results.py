"""Outcome of each request, and the figures of a report."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from cluster.lab.simulator.billing.costs import Costs
from cluster.lab.simulator.billing.meter import EngineMeter
from cluster.lab.simulator.spec import ClusterSpec
from cluster.lab.simulator.trace import Trace
from engine.core.request import Request

PER_DOUBLING = 32  # classes of a histogram per doubling, so that values are known to 1 percent
SMALLEST_S = 1e-6


@dataclass(slots=True)
class LatencyHistogram:
    """Histogram of the times between tokens, which are too many to keep. Each bucket ends at 2 ** (1 / PER_DOUBLING)
    times its start."""

    _counts: list[int] = field(default_factory=lambda: [0] * (40 * PER_DOUBLING))

    def add(self, seconds: float, count: int = 1) -> None:
        self._counts[self._index(seconds)] += count

    def add_steps(self, ends: Sequence[float], count: int) -> None:
        """Add the times between consecutive `ends`, each `count` times. The ends must not decrease."""
        first, last = self._index(ends[1] - ends[0]), self._index(ends[-1] - ends[-2])
        if first == last:
            self._counts[first] += count * (len(ends) - 1)
            return
        for before, end in pairwise(ends):
            self.add(end - before, count)

    def _index(self, seconds: float) -> int:
        index = int(PER_DOUBLING * math.log2(seconds / SMALLEST_S)) if seconds > SMALLEST_S else 0
        return min(index, len(self._counts) - 1)

    def __iadd__(self, other: LatencyHistogram) -> LatencyHistogram:
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        return self

    def percentile_ms(self, percent: float) -> float | None:
        """Return milliseconds; None if nothing was added."""
        total = sum(self._counts)
        if not total:
            return None
        index = int(np.searchsorted(np.cumsum(self._counts), percent / 100 * total))
        return 1000 * (SMALLEST_S * float(2 ** ((min(index, len(self._counts) - 1) + 0.5) / PER_DOUBLING)))


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies in milliseconds."""

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
    """Replicas of an autoscaled pool that took requests."""

    min: int
    max: int
    mean: float  #: mean over the simulated time
    wanted: int  #: maximum that the autoscaler wanted; above `max` if they were not up before the end
    sizes: list[tuple[float, int]]  #: (second, replicas that were up from then on)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """Work of a pool's replicas."""

    replicas: int  #: number of replicas at the start
    busy: float  #: fraction of the replicas' time in which they computed
    steps: int
    preemptions: int
    engine_hours: float  #: of replicas that were up
    starting_hours: float  #: of replicas that started
    gpu_hours: float  #: of the cards of replicas that were up
    scaled: ReplicaCounts | None = None  #: None if the number of replicas is fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffUse:
    """Handoffs between two pools."""

    count: int  #: prompts that the prefill pool computed
    gigabytes: float
    link_busy: float  #: mean fraction of the time in which a prefill replica was sending


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """Copies between KV caches and the tiers below them."""

    loaded_tokens: int  #: prompt tokens whose KV came from a tier
    gigabytes_loaded: dict[str, float]  #: by tier
    gigabytes_stored: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveUse:
    """Requests that moved away from replicas that the autoscaler ended."""

    count: int
    gigabytes: float  #: KV that moved with them


@dataclass(frozen=True, slots=True)
class Series:
    """Arrays with one entry per completed request."""

    ended_at: np.ndarray  #: seconds since the start
    ttft_s: np.ndarray
    e2e_s: np.ndarray
    output_tokens: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures of a simulation."""

    trace: str
    requests: int
    completed: int
    refused: int
    duration_s: float  #: time until the last request ended
    requests_per_s: float
    output_tokens_per_s: float
    goodput: float  #: requests per second that met the SLO
    good: float  #: fraction of all requests that met the SLO
    good_ttft: float  #: fraction that met at least its TTFT target
    good_tpot: float  #: fraction that met at least its TPOT target
    ttft_ms: Latencies | None  #: over requests, like the next two
    tpot_ms: Latencies | None
    e2e_ms: Latencies | None
    itl_p50_ms: float | None  #: over all pairs of consecutive tokens, in classes of 2%
    itl_p99_ms: float | None
    hit_rate: float  #: fraction of prompt tokens that were cached
    gpus: int
    pools: dict[str, PoolUse]
    handoffs: HandoffUse | None
    tiers: TierUse | None  #: None without tiers
    moves: MoveUse | None  #: None if requests do not move
    costs: Costs | None  #: None without prices
    series: Series = field(compare=False, repr=False)  #: data for charts
    took_s: float = 0.0  #: duration of the simulation on the real clock


def figures(report: Any) -> dict[str, Any]:
    """Return a Report, or a dataclass that contains Reports, in a form for JSON: all fields except `series`."""
    return asdict(report, dict_factory=lambda pairs: {key: value for key, value in pairs if key != "series"})


def most_at_a_time(pools: Sequence[ReplicaCounts]) -> int:
    """Return the largest number of replicas that all pools together had; roles may change between them."""
    times = sorted({at for counts in pools for at, _ in counts.sizes})
    return max(sum(counts.sizes[bisect(counts.sizes, (at, math.inf)) - 1][1] for counts in pools) for at in times)


class Results:
    """Arrays with one entry per request of the trace; nan while unknown. Times are seconds on the simulated clock."""

    def __init__(self, trace: Trace):
        self._trace = trace
        self.arrived_at = trace.arrivals_s.copy()  # turns of conversations come when they can
        self.first_at = np.full(len(trace), np.nan)
        self.last_at = np.full(len(trace), np.nan)
        self.cached = np.zeros(len(trace), dtype=np.int64)
        self.refused = 0

    def ended(self, request: Request, late_s: float) -> None:
        """Record an ended request. late_s: seconds that a token takes from the engine to the client."""
        index = int(request.request_id)
        assert request.clock.last_token_at is not None
        self.moved(request, late_s)
        self.last_at[index] = request.clock.last_token_at + late_s

    def moved(self, request: Request, late_s: float) -> None:
        """Record the beginning of a request, in the first replica that gave it a token. late_s: as for `ended`."""
        index, first_at = int(request.request_id), request.clock.first_token_at
        if first_at is not None and np.isnan(self.first_at[index]):
            self.first_at[index] = first_at + late_s
            self.cached[index] = request.prefix.num_cached

    @property
    def duration_s(self) -> float:
        """Seconds from the start until the last request ended."""
        return max(float(np.nanmax(self.last_at, initial=0.0)), 1e-9)

    def report(
        self,
        spec: ClusterSpec,
        itl: LatencyHistogram,
        pools: dict[str, PoolUse],
        handoffs: HandoffUse | None,
        tiers: TierUse | None,
        moves: MoveUse | None,
        meters: Sequence[EngineMeter] = (),
    ) -> Report:
        trace, done, duration_s = self._trace, ~np.isnan(self.last_at), self.duration_s
        ttft, e2e = self.first_at - self.arrived_at, self.last_at - self.arrived_at
        intervals = (trace.output_tokens - 1).astype(np.float64)
        intervals[intervals == 0] = np.nan  # a single token has none
        tpot = (self.last_at - self.first_at) / intervals
        good_ttft, good_tpot = done & (ttft <= spec.slo.ttft_s), done & ~(tpot > spec.slo.tpot_s)
        good = good_ttft & good_tpot
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
            good_ttft=float(good_ttft.mean()),
            good_tpot=float(good_tpot.mean()),
            ttft_ms=Latencies.of(ttft[done]),
            tpot_ms=Latencies.of(tpot[~np.isnan(tpot)]),
            e2e_ms=Latencies.of(e2e[done]),
            itl_p50_ms=itl.percentile_ms(50),
            itl_p99_ms=itl.percentile_ms(99),
            hit_rate=float(self.cached.sum()) / max(1, int(trace.prompt_tokens[done].sum())),
            gpus=spec.gpus,
            pools=pools,
            handoffs=handoffs,
            tiers=tiers,
            moves=moves,
            costs=self._costs(spec, pools, meters) if meters else None,
            series=Series(self.last_at[done], ttft[done], e2e[done], trace.output_tokens[done]),
        )

    def _costs(self, spec: ClusterSpec, pools: dict[str, PoolUse], meters: Sequence[EngineMeter]) -> Costs:
        done = ~np.isnan(self.last_at)
        scaled = [use.scaled for use in pools.values() if use.scaled is not None]
        return Costs.of(
            spec.prices,
            meters,
            engine_s=3600 * sum(use.engine_hours for use in pools.values()),
            starting_s=3600 * sum(use.starting_hours for use in pools.values()),
            most_engines=most_at_a_time(scaled) if scaled else None,
            seconds=self.duration_s,
            requests=int(done.sum()),
            prompt_tokens=int(self._trace.prompt_tokens[done].sum()),
            output_tokens=int(self._trace.output_tokens[done].sum()),
        )
