"""The autoscaler decides how many replicas there are, and which roles they have: the real policy, as Serve's controller
calls it, on the real reports of replicas and ingresses. Serve and Ray's GCS are modelled."""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict, deque
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import msgspec

from deployments.replicas.scaling_report import ReplicaReport, queue_report
from engine.errors import EngineUnavailable
from tests.days.part import Part

if TYPE_CHECKING:
    from cluster.autoscaling.scaler import ScalingDecision
    from cluster.autoscaling.slo import Limits, PoolSettings
    from deployments.routing.config import Role
    from tests.days.day import Day
    from tests.days.world import World

LOOP_S = 0.1  # of Serve's controller
REPORT_S, LOOK_BACK_S = 1.0, 5.0
LATE_S = 3.0  # for which a report may be on its way, and the next decision wait
GCS_S = 0.1


class Name(NamedTuple):
    """As Serve's DeploymentID."""

    app_name: str
    name: str


class Point(NamedTuple):
    """As Serve's TimeStampedValue."""

    timestamp: float
    value: float


class Reports:
    """What Serve keeps of the reports of one deployment."""

    def __init__(self) -> None:
        self._of = defaultdict[str, dict[str, deque[Point]]](dict)  # by replica and name

    def add(self, who: str, now: float, numbers: dict[str, float]) -> None:
        of_replica = self._of[who]
        for name, value in numbers.items():
            of_replica.setdefault(name, deque()).append(Point(now, value))

    def metrics(self, there: list[str], now: float) -> dict[str, dict[str, list[Point]]]:
        """Return the points of the last few seconds, by name and replica. there: replicas that are up."""
        found = defaultdict[str, dict[str, list[Point]]](dict)
        for who in there:
            for name, points in self._of[who].items():
                while points and points[0].timestamp < now - LOOK_BACK_S:
                    points.popleft()
                if points:
                    found[name][who] = list(points)
        return dict(found)


@dataclass(frozen=True)
class Scaling:
    """pools: settings by deployment."""

    pools: tuple[tuple[Role, PoolSettings], ...]

    def open(self, world: World) -> Part:
        return ScalingPart(world, dict(self.pools))


class ScalingPart(Part):
    """In place of ScalingMetrics too: every decision is recorded here, and checked."""

    settle_s = 25.0  # until the mean of a rate has faded

    def __init__(self, world: World, pools: dict[Role, PoolSettings]):
        from cluster.autoscaling import policy

        self._cluster, self._pools, self._seen = world.cluster, pools, world.cluster.seen
        self._cluster.is_autoscaled = True
        self._reports = {role: Reports() for role in [*pools, "ingress"]}
        self._wished = defaultdict[str, list[tuple[float, int]]](list)  # by pool, with their times
        self._options = {role: asdict(settings) for role, settings in pools.items()}
        self._busy_at: dict[str, float] = {}
        self._before: dict[str, int] = {}
        loop = world.loop
        ray = SimpleNamespace(
            serve_logs_to_console=lambda: True,
            roles_of=lambda app_name, name: "roles",
            share=self._share,
            engine_id_of=lambda replica: replica,
        )
        time = SimpleNamespace(monotonic=loop.time, time=loop.time)
        for name, value in (("ray_compat", ray), ("time", time), ("ScalingMetrics", lambda: self)):
            world.patches.enter_context(mock.patch.object(policy, name, value))
        self._policy = policy.Policy()
        self._running = [asyncio.ensure_future(self._report()), asyncio.ensure_future(self._decide())]

    def _share(self, table: str, value: bytes) -> None:
        roles = msgspec.msgpack.decode(value)
        self._cluster.loop.call_later(GCS_S, setattr, self._cluster, "roles", roles)

    # -- Serve's part --------------------------------------------------------------------------------------

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            for role in self._pools:
                for replica in self._cluster.deployments[role].replicas:
                    try:
                        numbers = ReplicaReport.of_all([replica.status()]).numbers()
                    except EngineUnavailable:
                        continue
                    self._send(replica.node, role, replica.engine_id, numbers)
            for ingress in self._cluster.ingresses:
                if ingress.up and not ingress.is_behind:
                    queue = ingress.admission
                    numbers = queue_report("m", queue.num_waiting, queue.waiting_tokens)
                    self._send(ingress.node, "ingress", ingress.node, numbers)

    def _send(self, node: str, role: str, who: str, numbers: dict[str, float]) -> None:
        now = self._cluster.loop.time()
        self._cluster.network.send(node, "controller", "reports", self._reports[role].add, who, now, numbers)

    async def _decide(self) -> None:
        while True:
            await asyncio.sleep(LOOP_S)
            names = {role: Name("manta", f"{role}-m") for role in self._pools}
            contexts = {names[role]: self._context(role) for role in self._pools}
            contexts[Name("manta", "ingress")] = self._ingresses()
            decided, _ = self._policy(contexts)
            for role, name in names.items():
                deployment = self._cluster.deployments[role]
                if decided[name] != deployment.num_replicas:
                    self._cluster.note(f"SCALE {role} from {deployment.num_replicas} to {decided[name]}")
                    deployment.scale(decided[name])

    def _context(self, role: Role) -> SimpleNamespace:
        deployment = self._cluster.deployments[role]
        there = [replica.engine_id for replica in deployment.replicas if not replica.stopping]
        return SimpleNamespace(
            current_num_replicas=len(there),
            target_num_replicas=deployment.num_replicas,
            raw_metrics=self._reports[role].metrics(there, self._cluster.loop.time()),
            total_queued_requests=sum(router.num_queued for router in deployment.routers),
            config=SimpleNamespace(policy=SimpleNamespace(policy_kwargs=self._options[role])),
        )

    def _ingresses(self) -> SimpleNamespace:
        there = [ingress.node for ingress in self._cluster.ingresses if ingress.up]
        return SimpleNamespace(
            target_num_replicas=len(self._cluster.ingresses),
            raw_metrics=self._reports["ingress"].metrics(there, self._cluster.loop.time()),
            config=SimpleNamespace(policy=SimpleNamespace(policy_kwargs={})),
        )

    # -- what decisions promise ------------------------------------------------------------------------------

    def record(self, pool: PoolSettings, before: int, decision: ScalingDecision, _: float) -> None:
        """As ScalingMetrics.record. The delays are those of docs/autoscaling.md."""
        now, limits, after, role = self._cluster.loop.time(), pool.limits, decision.replicas, pool.role
        before = self._before.get(role, before)
        self._before[role] = after
        wished = self._wished[role]
        wished.append((now, decision.desired))
        self._seen[f"autoscaler: {decision.reason}"] += 1
        if pool.roles is not None:
            return  # its limits are those of both roles together
        assert limits.min_replicas <= after <= limits.max_replicas, f"{after} replicas are out of bounds"
        if after > before:
            self._seen["autoscaler: up"] += 1
            assert before == 0 or all(n >= after for at, n in wished if at > now - limits.upscale_delay_s), (
                "up too early"
            )
            running = decision.inputs["running_replicas"]
            assert after <= max(1, 2 * running, limits.min_replicas), "more than twice as many at a time"
        elif after < before:
            self._seen["autoscaler: down"] += 1
            if after == 0:
                self._seen["autoscaler: to zero"] += 1
                idle_s = now - self._busy_at.get(role, -math.inf)
                assert idle_s >= limits.scale_to_zero_delay_s - LATE_S, "a pool with work is scaled to zero"
            else:
                largest = max(n for at, n in wished if at > now - limits.downscale_delay_s)
                assert after >= min(before, largest), "down too early"

    def check(self) -> None:
        now = self._cluster.loop.time()
        for role in self._pools:
            deployment = self._cluster.deployments[role]
            engines = [replica.engine for replica in deployment.replicas]
            waiting = role == "decode" and any(
                ingress.admission.num_waiting for ingress in self._cluster.ingresses if ingress.up
            )
            if waiting or any(engine.alive and not engine.paused and engine.core.has_work for engine in engines):
                self._busy_at[role] = now

    def check_end(self) -> None:
        for role, pool in self._pools.items():
            if pool.roles is None:
                there = self._cluster.deployments[role].num_replicas
                assert there == pool.limits.min_replicas, f"{there} {role} replicas are kept without work"
        for task in self._running:
            if task.done():
                task.result()


def add(day: Day, rng: random.Random) -> Day:
    """Let the autoscaler decide on some days."""
    if rng.random() < 0.85:
        return day
    from cluster.autoscaling.slo import PoolSettings, RoleSettings, Slo

    size, slo = day.size, Slo(ttft_ms=rng.choice([100.0, 500.0, 2000.0]), itl_ms=rng.choice([5.0, 30.0, 100.0]))
    most = rng.choice([2, 3, 4])
    roles = None
    if size.roles:
        total = size.decode + size.prefill
        roles = RoleSettings(
            prefill=_limits(rng, size.max_num_seqs, 0, total), min_total=total, max_total=max(most, total),
            initial_prefill=1,
        )  # fmt: skip
    low = 1 if size.roles else rng.choice([0, 1])
    pools: list[tuple[Role, PoolSettings]] = [
        (
            "decode",
            PoolSettings("m", "decode", slo, _limits(rng, size.max_num_seqs, low, max(most, size.decode)), roles),
        )
    ]
    if size.prefill and not size.roles:
        low = rng.choice([0, 1])
        limits = _limits(rng, size.max_num_seqs, low, max(most, size.prefill))
        pools.append(("prefill", PoolSettings("m", "prefill", slo, limits)))
    if size.encoders:
        limits = _limits(rng, size.max_num_seqs, 1, max(most, size.encoders))
        pools.append(("encode", PoolSettings("m", "encode", slo, limits)))
    faults = tuple(fault for fault in day.faults if fault.kind not in ("scale", "switch role"))
    return replace(day, faults=faults, parts=(*day.parts, Scaling(tuple(pools))))


def _limits(rng: random.Random, max_num_seqs: int, low: int, high: int) -> Limits:
    from cluster.autoscaling.slo import Limits

    return Limits(
        min_replicas=low,
        max_replicas=high,
        max_num_seqs=max_num_seqs,
        upscale_delay_s=rng.choice([0.0, 0.0, 2.0]),
        downscale_delay_s=rng.choice([1.0, 4.0]),
        scale_to_zero_delay_s=rng.choice([1.0, 4.0]),
    )
