"""Runs the policy of cluster/autoscaling/ on the simulated clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from cluster.autoscaling.scaler import EngineCosts, ModelScaler, PoolLoad, ReplicaLoad
from cluster.simulator.pool import Pool
from cluster.simulator.replica import Replica
from cluster.simulator.results import ReplicaCounts
from cluster.simulator.spec import ScalingSpec
from deployments.frontend.fair_queue import FairQueue
from deployments.routing.config import Role

MEMORY_S = 5.0  # over which rates are taken


@dataclass(frozen=True, slots=True)
class _Counters:
    at: float
    prefill_tokens: int
    prefills: int
    cached_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, replica: Replica, now: float) -> _Counters:
        totals, times = replica.scheduler.totals, replica.times
        assert times is not None, "an autoscaler needs what engines learn of their steps"
        return cls(now, times.prefill_tokens, times.prefills, totals.prefix_hit_tokens, totals.generation_tokens)


class Scaling:
    """Starts and drains replicas as the autoscaler decides."""

    def __init__(
        self,
        spec: ScalingSpec,
        pools: dict[Role, Pool],
        queue: FairQueue,
        later: Callable[[float, Callable[[], None]], None],
    ):
        """later: calls something in so many seconds."""
        self._spec, self._pools, self._queue, self._later = spec, pools, queue, later
        self._scaler = ModelScaler(spec.targets, spec.limits)
        self._wanted: dict[Role, int] = {role: len(pool.up) for role, pool in pools.items()}
        self._counters: dict[Replica, deque[_Counters]] = {}
        # (when, replicas) after each change, of the replicas that there should be, and of those that are up
        self.history: dict[Role, list[tuple[float, int]]] = {role: [(0.0, n)] for role, n in self._wanted.items()}
        self.up: dict[Role, list[tuple[float, int]]] = {role: [(0.0, n)] for role, n in self._wanted.items()}

    def poll(self, now: float) -> None:
        """Call about once a second."""
        loads = {role: self._load(role, now) for role in self._pools}
        for role, decision in self._scaler.decide(loads, now).items():
            if decision.replicas != self._wanted[role]:
                self.history[role].append((now, decision.replicas))
                self._scale(role, decision.replicas, now)

    def counts(self, role: Role, duration_s: float) -> ReplicaCounts:
        """duration_s: of the simulation, above 0."""
        counts = [replicas for _, replicas in self.up[role]]
        times = [min(when, duration_s) for when, _ in self.up[role]] + [duration_s]
        return ReplicaCounts(
            least=min(counts),
            most=max(counts),
            mean=sum(n * (end - begin) for n, (begin, end) in zip(counts, pairwise(times), strict=True)) / duration_s,
            wanted=max(replicas for _, replicas in self.history[role]),
        )

    def _scale(self, role: Role, replicas: int, now: float) -> None:
        pool, before = self._pools[role], self._wanted[role]
        self._wanted[role] = replicas
        for _ in range(replicas - before):
            self._later(self._spec.startup_s, lambda: self._start(role, now + self._spec.startup_s))
        for _ in range(len(pool.up) - replicas):
            pool.drain()
            self.up[role].append((now, len(pool.up)))

    def _start(self, role: Role, now: float) -> None:
        """A replica is up, if it is still wanted."""
        pool = self._pools[role]
        if len(pool.up) < self._wanted[role]:
            pool.grow(now)
            self.up[role].append((now, len(pool.up)))

    def _load(self, role: Role, now: float) -> PoolLoad:
        replicas = [self._replica_load(replica, now) for replica in self._pools[role].up.values()]
        answers = role == "decode"
        return PoolLoad(
            target_replicas=self._wanted[role],
            running_replicas=len(replicas),
            replicas=replicas,
            waiting=self._queue.num_waiting if answers else 0,
            waiting_tokens=self._queue.waiting_tokens if answers else 0,
        )

    def _replica_load(self, replica: Replica, now: float) -> ReplicaLoad:
        replica.catch_up(now)
        counters = self._counters.setdefault(replica, deque())
        counters.append(last := _Counters.of(replica, now))
        while counters[0].at < now - MEMORY_S:
            counters.popleft()
        first, seconds = counters[0], max(now - counters[0].at, 1e-9)
        scheduler, times = replica.scheduler, replica.times
        assert times is not None
        step_s, sequence_s = times.by_sequences.coefficients
        output_per_s = (last.output_tokens - first.output_tokens) / seconds
        load, running = scheduler.load(), len(scheduler.queue.running)
        return ReplicaLoad(
            running=running,
            waiting=load.sequences - running,
            queued_tokens=load.queued_tokens,
            prefill_tokens_per_s=(last.prefill_tokens - first.prefill_tokens) / seconds,
            cached_tokens_per_s=(last.cached_tokens - first.cached_tokens) / seconds,
            prefills_per_s=(last.prefills - first.prefills) / seconds,
            output_tokens_per_s=output_per_s,
            itl_s=running / output_per_s if output_per_s else 0.0,
            blocks_used=load.blocks_used,
            blocks_total=load.blocks_total,
            costs=EngineCosts(decode_step_s=step_s, decode_sequence_s=sequence_s, token_s=times.prompt_token_s),
        )
