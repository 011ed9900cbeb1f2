"""Runs the policy of cluster/autoscaling/ on the simulated clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cluster.autoscaling.scaler import EngineCosts, ModelScaler, PoolLoad, ReplicaLoad
from cluster.autoscaling.slo import LOOK_BACK_S, Limits, Slo
from cluster.simulator.events import EventLoop
from cluster.simulator.pool import Pool
from cluster.simulator.replica import Replica
from cluster.simulator.spec import ClusterSpec
from deployments.routing.config import Role
from engine.core.engine_stats import load_of
from engine.fairness.fair_queue import FairQueue


class Scaling:
    """Starts and drains replicas as decided by the autoscaler."""

    def __init__(
        self,
        spec: ClusterSpec,
        limits: Limits,
        pools: dict[Role, Pool],
        queue: FairQueue,
        loop: EventLoop,
        drained: Callable[[Replica], None],
    ):
        """drained: function called with each replica that gets no more requests."""
        self._startup_s, self._pools, self._queue, self._loop = spec.startup_s, pools, queue, loop
        self._drained = drained
        targets = Slo(ttft_ms=1000 * spec.slo.ttft_s, itl_ms=1000 * spec.slo.tpot_s)
        self._scaler = ModelScaler(targets, dict.fromkeys(pools, limits))
        self._seen: dict[Replica, deque[tuple[float, tuple[int, ...]]]] = {}  # (time, totals of the replica)

    def poll(self) -> None:
        """Scale the pools. Call it about once a second."""
        now = self._loop.now
        loads = {role: self._load(role, now) for role in self._pools}
        for role, decision in self._scaler.decide(loads, now).items():
            pool = self._pools[role]
            if decision.replicas != pool.desired[-1]:
                for _ in range(decision.replicas - pool.desired[-1]):
                    self._loop.later(self._startup_s, self._start, pool)
                pool.desired.append(decision.replicas)
                while len(pool.up) > decision.replicas:
                    self._drained(pool.drain(now))

    def _start(self, pool: Pool) -> None:
        """Bring up a replica that has finished starting, if it is still desired."""
        if len(pool.up) < pool.desired[-1]:
            pool.grow(self._loop.now)

    def _load(self, role: Role, now: float) -> PoolLoad:
        pool, answers = self._pools[role], role == "decode"
        return PoolLoad(
            target_replicas=pool.desired[-1],
            running_replicas=len(pool.up),
            replicas=[self._replica_load(replica, now) for replica in pool.up.values()],
            waiting=self._queue.num_waiting if answers else 0,
            waiting_tokens=self._queue.waiting_tokens if answers else 0,
        )

    def _replica_load(self, replica: Replica, now: float) -> ReplicaLoad:
        replica.catch_up(now)
        scheduler, times = replica.scheduler, replica.times
        assert times is not None, "an autoscaler needs the step times that engines learn"
        totals, seen = scheduler.totals, self._seen.setdefault(replica, deque())
        last = times.prefill_tokens, totals.prefix_hit_tokens, times.prefills, totals.generation_tokens
        seen.append((now, last))
        while seen[0][0] < now - LOOK_BACK_S:
            seen.popleft()
        first_at, first = seen[0]
        seconds = max(now - first_at, 1e-9)
        prefilled, cached, prefills, output = ((b - a) / seconds for a, b in zip(first, last, strict=True))
        step_s, sequence_s = times.by_sequences.coefficients
        load, running = load_of(scheduler), len(scheduler.queue.running)
        return ReplicaLoad(
            running=running,
            waiting=load.sequences - running,
            queued_tokens=load.queued_tokens,
            prefill_tokens_per_s=prefilled,
            cached_tokens_per_s=cached,
            prefills_per_s=prefills,
            output_tokens_per_s=output,
            itl_s=running / output if output else 0.0,
            blocks_used=load.blocks_used,
            blocks_total=load.blocks_total,
            costs=EngineCosts(decode_step_s=step_s, decode_sequence_s=sequence_s, token_s=times.prompt_token_s),
        )
