"""Runs the policy of cluster/autoscaling/ on the simulated clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from cluster.autoscaling.roles import Member, RoleScaler
from cluster.autoscaling.scaler import EngineCosts, ModelScaler, PoolLoad, ReplicaLoad
from cluster.autoscaling.slo import LOOK_BACK_S, Limits, RoleSettings, Slo
from cluster.lab.simulator.events import EventLoop
from cluster.lab.simulator.pool import Pool
from cluster.lab.simulator.replica import Replica
from cluster.lab.simulator.spec import ClusterSpec
from deployments.routing.config import Role
from engine.core.engine_stats import load_of
from engine.core.request import State
from engine.fairness.fair_queue import FairQueue

ROLE_CHANGE_S = 0.3  # until the routers know: replicas read roles every 0.2 s, and engines report every 0.1 s


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
        self._targets = Slo(ttft_ms=1000 * spec.slo.ttft_s, itl_ms=1000 * spec.slo.tpot_s)
        self._scaler = ModelScaler(self._targets, dict.fromkeys(pools, limits))
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
        pool.starting_s += self._startup_s
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
        load, running, receiving = (
            load_of(scheduler),
            len(scheduler.queue.running),
            len(scheduler.parts.kept(State.WAITING_FOR_REMOTE_KV)),
        )
        return ReplicaLoad(
            running=running + receiving,
            receiving=receiving,
            waiting=load.sequences - running - receiving,
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


class RoleScaling(Scaling):
    """Moves replicas between the two pools, and starts and drains them, as decided by the autoscaler."""

    def __init__(
        self,
        spec: ClusterSpec,
        limits: Limits,
        pools: dict[Role, Pool],
        queue: FairQueue,
        loop: EventLoop,
        drained: Callable[[Replica], None],
    ):
        """limits: limits of each pool, but max_replicas limits both pools together. drained: as for Scaling."""
        super().__init__(spec, limits, pools, queue, loop, drained)
        self._total = sum(spec.sizes.values())
        own = replace(limits, max_replicas=limits.max_replicas - 1)
        settings = RoleSettings(
            prefill=own,
            min_total=min(self._total, limits.max_replicas),
            max_total=limits.max_replicas,
            initial_prefill=spec.prefill_replicas,
        )
        self._roles = RoleScaler(self._targets, own, settings)

    def poll(self) -> None:
        now, queue = self._loop.now, self._queue
        up = {name: (role, replica) for role, pool in self._pools.items() for name, replica in pool.up.items()}
        members = {name: Member(role, self._replica_load(replica, now)) for name, (role, replica) in up.items()}
        decision = self._roles.decide(members, queue.num_waiting, queue.waiting_tokens, self._total, len(members), now)
        for name, role in decision.roles.items():
            if role != members[name].role:
                self._loop.later(ROLE_CHANGE_S, self._change, up[name][1], role)
        for _ in range(decision.replicas - self._total):
            self._loop.later(self._startup_s, self._start, self._pools["decode"])
        self._total = decision.replicas
        for role, pool in self._pools.items():
            if (count := decision.decisions[role].replicas) != pool.desired[-1]:
                pool.desired.append(count)
        while sum(len(pool.up) for pool in self._pools.values()) > self._total:
            fullest = max(self._pools.values(), key=lambda pool: len(pool.up) - pool.desired[-1])
            self._drained(fullest.drain(now))

    def _start(self, pool: Pool) -> None:
        pool.starting_s += self._startup_s
        if sum(len(pool.up) for pool in self._pools.values()) < self._total:
            pool.grow(self._loop.now)

    def _change(self, replica: Replica, role: Role) -> None:
        """Let a replica change its role, unless it has been drained meanwhile."""
        if replica.name in self._pools[replica.role].up:
            self._pools[role].adopt(replica, self._pools[replica.role], self._loop.now)
