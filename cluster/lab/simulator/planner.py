"""Finds the fewest GPUs that meet the SLO, by simulating one cluster after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.lab.simulator.cluster import simulate
from cluster.lab.simulator.results import Report
from cluster.lab.simulator.spec import ClusterSpec
from cluster.lab.simulator.trace import Trace


@dataclass(frozen=True, slots=True)
class Candidate:
    """A simulated cluster."""

    decode: int
    prefill: int  #: prefill replicas; 0 for one pool that does both
    report: Report

    @property
    def gpus(self) -> int:
        return self.report.gpus

    @property
    def name(self) -> str:
        if self.prefill:
            return f"{self.prefill} prefill + {self.decode} decode"
        return f"{self.decode} replica{'s' if self.decode > 1 else ''}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The smallest cluster of each kind that meets the SLO; None if none does or if the kind was not tried."""

    shared: Candidate | None
    split: Candidate | None
    tried: list[Candidate]

    @property
    def best(self) -> Candidate | None:
        found = [candidate for candidate in (self.shared, self.split) if candidate is not None]
        return min(found, key=lambda c: (c.gpus, -c.report.good), default=None)


class Planner:
    """Searches clusters of up to `max_gpus` GPUs.

    It assumes that more replicas of a pool never lower the fraction of good requests, except by chance.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        trace: Trace,
        max_gpus: int,
        on_result: Callable[[Candidate], None] = lambda candidate: None,
    ):
        """spec: cluster whose numbers of replicas are searched. Without prefill replicas, two pools are not tried."""
        self._spec, self._trace, self._max_gpus, self._on_result = spec, trace, max_gpus, on_result
        self._tried: dict[tuple[int, int], Candidate] = {}

    def plan(self) -> Plan:
        shared = self._fewest(lambda n: self._try(n, 0), self._max_gpus // self._spec.replica_gpus)
        split = self._split() if self._spec.prefill_replicas else None
        return Plan(shared, split, list(self._tried.values()))

    def _split(self) -> Candidate | None:
        """Until both pools suffice, double whichever pool improves the result more; then shrink each pool as far as
        possible."""
        best = self._try(1, 1)
        while not self._suffices(best):
            larger = [(2 * best.decode, best.prefill), (best.decode, 2 * best.prefill)]
            found = [self._try(*sizes) for sizes in larger if sum(sizes) * self._spec.replica_gpus <= self._max_gpus]
            if not found:
                return None
            best = max(found, key=lambda c: (c.report.good, c.report.good_ttft + c.report.good_tpot, -c.gpus))
        for _ in range(2):  # shrinking one pool may allow the other to shrink further
            start = best
            best = self._fewest(lambda n, d=best.decode: self._try(d, n), best.prefill) or best  # type: ignore[misc]
            best = self._fewest(lambda n, p=best.prefill: self._try(n, p), best.decode) or best  # type: ignore[misc]
            if (best.decode, best.prefill) == (start.decode, start.prefill):
                break
        return best

    def _fewest(self, of: Callable[[int], Candidate], limit: int) -> Candidate | None:
        """Return the smallest number up to `limit` that suffices, found by doubling and then by bisection."""
        low = high = 1
        while not self._suffices(found := of(high)):
            if high >= limit:
                return None
            low, high = high + 1, min(2 * high, limit)
        best = found
        while low < high:
            middle = (low + high) // 2
            if self._suffices(found := of(middle)):
                best, high = found, middle
            else:
                low = middle + 1
        return best

    def _suffices(self, candidate: Candidate) -> bool:
        return candidate.report.good >= self._spec.slo.fraction

    def _try(self, decode: int, prefill: int) -> Candidate:
        if (decode, prefill) not in self._tried:
            report = simulate(replace(self._spec, replicas=decode, prefill_replicas=prefill), self._trace)
            self._tried[decode, prefill] = candidate = Candidate(decode, prefill, report)
            self._on_result(candidate)
        return self._tried[decode, prefill]
