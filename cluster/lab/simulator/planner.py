"""Finds the fewest GPUs that meet the SLO, by simulating one cluster after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.lab.simulator.cluster import simulate
from cluster.lab.simulator.results import Report
from cluster.lab.simulator.spec import ClusterSpec
from cluster.lab.simulator.trace import Trace

Sizes = tuple[int, int]  # decode replicas, prefill replicas
CHANCE = 0.05  # fraction of the requests that a smaller cluster may serve better than a larger one
LEVEL = 0.005  # fraction of the requests; if twice the replicas serve no more of them better, no number helps
FEW = 8  # replicas, of which every number is tried that may suffice
NEAR_MISSES = 50  # clusters in a row that miss the SLO by no more than CHANCE, after which the search ends


@dataclass(frozen=True, slots=True)
class Candidate:
    """A simulated cluster."""

    decode: int
    prefill: int  #: prefill replicas; 0 for one pool that does both
    replica_gpus: int
    report: Report

    @property
    def gpus(self) -> int:
        return self.report.gpus

    @property
    def replicas(self) -> int:
        return self.decode + self.prefill

    @property
    def name(self) -> str:
        each = f"of {self.replica_gpus} GPU{'s' if self.replica_gpus > 1 else ''}"
        if self.prefill:
            return f"{self.prefill} prefill + {self.decode} decode {each}"
        return f"{self.decode} replica{'s' if self.decode > 1 else ''} {each}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The smallest cluster of each kind that meets the SLO; None if none does or if the kind was not tried."""

    shared: Candidate | None
    split: Candidate | None
    tried: list[Candidate]
    replica_gpus: list[int]  #: sizes of a replica among which the plan chooses
    unfinished: list[int]  #: those of them whose search ended after NEAR_MISSES
    max_gpus: int

    @property
    def best(self) -> Candidate | None:
        found = [candidate for candidate in (self.shared, self.split) if candidate is not None]
        return min(found, key=lambda c: (c.gpus, -c.report.good), default=None)


class Planner:
    """Searches clusters of up to `max_gpus` GPUs.

    It assumes that more replicas of a pool do not lower the fraction of good requests by more than CHANCE. So a cluster
    that misses the SLO by more is tried once for all smaller ones. So is one that misses it by less, if half of its
    replicas serve about as many requests well, for then their number is not what is missing.
    """

    def __init__(
        self,
        specs: Sequence[ClusterSpec],
        trace: Trace,
        max_gpus: int,
        on_result: Callable[[Candidate], None] = lambda candidate: None,
    ):
        """specs: clusters whose numbers of replicas are searched, one for each size of a replica, the most promising
        first. Without prefill replicas, two pools are not tried."""
        self._specs, self._trace, self._max_gpus, self._on_result = specs, trace, max_gpus, on_result
        self._tried: list[Candidate] = []

    def plan(self) -> Plan:
        shared, split, unfinished = None, None, []
        for spec in self._specs:
            search = _Search(spec, self._simulated)
            shared = search.shared(self._limit(spec, shared), shared is None) or shared
            if spec.prefill_replicas:
                split = search.split(self._limit(spec, split), split is None) or split
            if search.unfinished:
                unfinished.append(spec.replica_gpus)
        sizes = sorted(spec.replica_gpus for spec in self._specs)
        return Plan(shared, split, self._tried, sizes, sorted(unfinished), self._max_gpus)

    def _limit(self, spec: ClusterSpec, best: Candidate | None) -> int:
        """Return how many replicas take fewer GPUs than the best cluster so far."""
        return (self._max_gpus if best is None else best.gpus - 1) // spec.replica_gpus

    def _simulated(self, spec: ClusterSpec, decode: int, prefill: int) -> Candidate:
        report = simulate(replace(spec, replicas=decode, prefill_replicas=prefill), self._trace)
        candidate = Candidate(decode, prefill, spec.replica_gpus, report)
        self._tried.append(candidate)
        self._on_result(candidate)
        return candidate


class _Search:
    """The search among the numbers of replicas of one size."""

    def __init__(self, spec: ClusterSpec, simulated: Callable[[ClusterSpec, int, int], Candidate]):
        self._spec, self._simulated = spec, simulated
        self._tried: dict[Sizes, Candidate] = {}
        self._level: list[Sizes] = []
        self._near_misses = 0
        self.unfinished = False

    def shared(self, limit: int, climb: bool) -> Candidate | None:
        """Return the fewest replicas of one pool, up to `limit`. climb: whether to begin with one; else with `limit`,
        where the search ends if another size of a replica does with fewer GPUs."""
        return self._searched(
            (1, 0) if climb else None,
            limit,
            lambda most: self._below(_one_pool, most),
            lambda found: self._fewest(_one_pool, found.decode),
        )

    def split(self, limit: int, climb: bool) -> Candidate | None:
        """Return the fewest replicas of two pools, up to `limit` together."""
        return self._searched((1, 1) if climb else None, limit, self._within, self._shrunk)

    def _searched(
        self,
        start: Sizes | None,
        limit: int,
        within: Callable[[int], Candidate | None],
        shrunk: Callable[[Candidate], Candidate],
    ) -> Candidate | None:
        """Return the fewest replicas up to `limit` that suffice. start: where to begin to climb. within: returns a
        cluster of up to a number of replicas that suffices. shrunk: makes one as small as possible."""
        self._near_misses = 0
        best, found = None, (self._climbed(start, limit) if start else None) or within(limit)
        while found is not None:
            best = shrunk(found)
            found = within(best.replicas - 1)
        return best

    def _climbed(self, start: Sizes, limit: int) -> Candidate | None:
        """Double the pool that improves the result more until the cluster suffices, or nearly does and is no better
        than half of it."""
        before, sizes = -1.0, [start]
        while found := [self._try(each) for each in sizes if sum(each) <= limit]:
            best = max(found, key=lambda c: (c.report.good, c.report.good_ttft + c.report.good_tpot, -c.gpus))
            if self._suffices(best):
                return best
            if best.report.good >= self._low and best.report.good - before < LEVEL:
                return None
            before, sizes = best.report.good, [(2 * best.decode, best.prefill)]
            if best.prefill:
                sizes.append((best.decode, 2 * best.prefill))
        return None

    def _within(self, total: int) -> Candidate | None:
        """Return two pools of up to `total` replicas together that suffice. Decode pools of several sizes are excluded
        at once if a cluster with the largest of them, and with the most prefill replicas beside any, is hopeless."""
        ranges = [(1, total - 1)] if total > 1 else []
        while ranges:
            low, high = ranges.pop()
            corner = high, total - low
            if low == high:
                if found := self._below(lambda n, d=low: (d, n), total - low):  # type: ignore[misc]
                    return found
            elif not self._hopeless(corner):
                larger = self._tried.get(corner)  # None if it is known to suffice because a smaller one does
                if larger and self._suffices(larger) and (found := self._shrunk(larger)).replicas <= total:
                    return found
                middle = (low + high) // 2
                ranges += [(low, middle), (middle + 1, high)]
        return None

    def _shrunk(self, found: Candidate) -> Candidate:
        """Shrink each pool as far as possible."""
        best = self._fewest(lambda n: (found.decode, n), found.prefill)
        return self._fewest(lambda n: (n, best.prefill), best.decode)

    def _fewest(self, sizes: Callable[[int], Sizes], enough: int) -> Candidate:
        """Return the smallest number that suffices, found by bisection. enough: one that does."""
        low, high = 1, enough
        while low < high:
            middle = (low + high) // 2
            if self._hopeless(sizes(middle)) or not self._suffices(self._try(sizes(middle))):
                low = middle + 1
            else:
                high = middle
        return self._try(sizes(high))

    def _below(self, sizes: Callable[[int], Sizes], limit: int) -> Candidate | None:
        """Return the largest number up to `limit` that suffices, unless a larger one is hopeless."""
        for number in range(limit, 0, -1):
            if self._hopeless(sizes(number)):
                return None
            if self._suffices(found := self._try(sizes(number))):
                return found
        return None

    def _suffices(self, candidate: Candidate) -> bool:
        return candidate.report.good >= self._spec.slo.fraction

    @property
    def _low(self) -> float:
        """Fraction of good requests below which no smaller cluster suffices by chance."""
        return self._spec.slo.fraction - CHANCE

    def _hopeless(self, sizes: Sizes) -> bool:
        """Return whether neither these pools nor smaller ones can suffice, or too many have missed the SLO."""
        self.unfinished |= self._near_misses >= NEAR_MISSES
        if self._near_misses >= NEAR_MISSES or any(_covers(larger, sizes) for larger in self._level):
            return True
        tried = self._tried.items()
        if any(_covers(larger, sizes) and candidate.report.good < self._low for larger, candidate in tried):
            return True
        if any(_covers(sizes, smaller) and self._suffices(candidate) for smaller, candidate in tried):
            return False
        if self._try(sizes).report.good < self._low:
            return True
        if self._is_level(sizes):
            self._level.append(sizes)
            return True
        return False

    def _is_level(self, sizes: Sizes) -> bool:
        """Return whether these pools do not suffice, and half of their replicas do about as well."""
        if sum(sizes) <= FEW or any(_covers(larger, sizes) and self._suffices(c) for larger, c in self._tried.items()):
            return False
        good = self._try(sizes).report.good
        half = self._try((max(1, sizes[0] // 2), max(1, sizes[1] // 2) if sizes[1] else 0))
        return not self._suffices(half) and abs(good - half.report.good) < LEVEL

    def _try(self, sizes: Sizes) -> Candidate:
        if sizes not in self._tried:
            self._tried[sizes] = found = self._simulated(self._spec, *sizes)
            near = self._low <= found.report.good < self._spec.slo.fraction
            self._near_misses = 0 if self._suffices(found) else self._near_misses + near
        return self._tried[sizes]


def _one_pool(replicas: int) -> Sizes:
    return replicas, 0


def _covers(larger: Sizes, smaller: Sizes) -> bool:
    """Return whether each of the pools is at least as large, and there are as many pools."""
    return larger[0] >= smaller[0] and larger[1] >= smaller[1] and bool(larger[1]) == bool(smaller[1])
