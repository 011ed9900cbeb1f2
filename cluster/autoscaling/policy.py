"""The application's autoscaling policy, which Serve calls: `autoscaling_policy` in serve_config.yaml names it."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from ray.util.metrics import Counter, Gauge

from cluster.autoscaling.roles import Member, RoleScaler
from cluster.autoscaling.scaler import EngineCosts, ModelScaler, PoolLoad, ReplicaLoad, ScalingDecision
from cluster.autoscaling.slo import PoolSettings
from deployments import ray_compat
from deployments.replicas.scaling_report import DEFAULTS, ScalingChange, waiting_of, waiting_tokens_of
from deployments.routing.config import Role

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext
from placement.console_log import console_handler

logger = logging.getLogger("ray.serve.manta.autoscaling")  # a child of Serve's logger, whose handlers it shares

DECISION_INTERVAL_S = 1.0  # Serve calls ten times as often
COMPLAINT_INTERVAL_S = 60.0
STEADY_LOG_INTERVAL_S = 60.0  # between two lines about a pool that has work and keeps its number of replicas
NUM_SHARED_CHANGES = 50  # newest changes, for the console
MIN_WINDOW_S = 0.5  # minimum time between the two reports from which a rate is computed
POOL_TAGS = ("model_name", "pool")


class Policy:
    """Autoscaling policy in Serve's controller, which creates it when the application is deployed and calls it in its
    control loop. It never raises an error, since an error would stop that loop for all applications. If it cannot
    decide, the numbers stay as they are."""

    def __init__(self) -> None:
        if not ray_compat.serve_logs_to_console():  # behind HAProxy, Serve's loggers write to files only
            logger.handlers = [console_handler("controller")]
        self._metrics = ScalingMetrics()
        self._scalers: dict[str, ModelScaler] = {}
        self._settings: dict[str, list[PoolSettings]] = {}
        self._switches: dict[Any, RoleSwitch] = {}  # by DeploymentID
        self._decided: dict[Any, int] = {}
        self._due = self._complain_at = 0.0

    def __call__(self, contexts: dict[Any, AutoscalingContext]) -> tuple[dict[Any, int], None]:
        """Return the number of replicas of each deployment. contexts: Serve's view of each autoscaled deployment, by
        DeploymentID."""
        now = time.monotonic()
        if now >= self._due or contexts.keys() != self._decided.keys():
            self._due = now + DECISION_INTERVAL_S
            try:
                self._decided = self._decide(contexts, now)
            except Exception:  # whatever it is: see the class
                self._decided = {name: context.target_num_replicas for name, context in contexts.items()}
                if now >= self._complain_at:
                    self._complain_at = now + COMPLAINT_INTERVAL_S
                    logger.exception("autoscaling cannot decide, so the numbers of replicas stay as they are")
        return self._decided, None

    def _decide(self, contexts: dict[Any, Any], now: float) -> dict[Any, int]:
        decided = {name: context.target_num_replicas for name, context in contexts.items()}
        pools = {name: PoolSettings.parse(context.config.policy.policy_kwargs) for name, context in contexts.items()}
        ingresses = [contexts[name] for name, pool in pools.items() if pool is None]
        for model in {pool.model for pool in pools.values() if pool is not None}:
            ours = {name: pool for name, pool in pools.items() if pool is not None and pool.model == model}
            queue = queue_of(ingresses, model)
            for name in [name for name, pool in ours.items() if pool.roles is not None]:
                decided[name] = self._switch(name, ours.pop(name)).decide(contexts[name], queue, now)
            if not ours:
                continue
            loads = {
                pool.role: pool_load(contexts[name], *(queue if pool.role == "decode" else ()))
                for name, pool in ours.items()
            }
            decisions = self._scaler(model, list(ours.values())).decide(loads, now)
            for name, pool in ours.items():
                decision = decisions[pool.role]
                self._metrics.record(pool, decided[name], decision, now)
                decided[name] = decision.replicas
        return decided

    def _switch(self, name: Any, pool: PoolSettings) -> RoleSwitch:
        """Return the switch of a deployment whose replicas change roles; a new one if its settings have changed."""
        if (switch := self._switches.get(name)) is None or switch.pool != pool:
            switch = self._switches[name] = RoleSwitch(name, pool, self._metrics)
        return switch

    def _scaler(self, model: str, pools: list[PoolSettings]) -> ModelScaler:
        """Return the model's scaler; a new one if its settings have changed."""
        if self._settings.get(model) != pools:
            self._settings[model] = pools
            self._scalers[model] = ModelScaler(pools[0].slo, {pool.role: pool.limits for pool in pools})
        return self._scalers[model]


class RoleSwitch:
    """Tells the replicas of one deployment their roles, by a table in Ray's GCS."""

    def __init__(self, name: Any, pool: PoolSettings, metrics: ScalingMetrics):
        """name: DeploymentID of the deployment."""
        assert pool.roles is not None
        self.pool = pool
        self._table, self._metrics = ray_compat.roles_of(name.app_name, name.name), metrics
        self._scaler = RoleScaler(pool.slo, pool.limits, pool.roles)
        self._pools = {"decode": pool, "prefill": replace(pool, role="prefill", limits=pool.roles.prefill)}
        self._roles: dict[str, Role] = {}

    def decide(self, context: AutoscalingContext, queue: tuple[int, int], now: float) -> int:
        """Publish the roles. Returns the number of replicas that the deployment should have."""
        load = pool_load(context, *queue)
        members = self._members(context.raw_metrics or {})
        target, running = load.target_replicas, load.running_replicas
        decision = self._scaler.decide(members, load.waiting, load.waiting_tokens, target, running, now)
        if decision.roles != self._roles:
            ray_compat.share(self._table, msgspec.msgpack.encode(decision.roles))
            self._roles = decision.roles  # not before: if the GCS does not answer, the next decision tries again
        for role, of_role in decision.decisions.items():
            self._metrics.record(self._pools[role], of_role.replicas, of_role, now)
        return decision.replicas

    def _members(self, reports: Any) -> dict[str, Member]:
        """Return the replicas that have reported, by the id of their engines. A replica's role is the one that this
        policy gave it; if it gave none since the controller's start, the one that the replica reports."""
        members = {}
        for replica, points in reports.get("running", {}).items():
            if points:
                engine = ray_compat.engine_id_of(replica)
                reported: Role = "prefill" if _newest(reports, "prefill_role", replica) else "decode"
                members[engine] = Member(self._roles.get(engine, reported), _replica_load(reports, replica))
        return members


# -- reports in ----------------------------------------------------------------------------------------------


def pool_load(context: AutoscalingContext, waiting: int = 0, waiting_tokens: int = 0) -> PoolLoad:
    """Return the load from the reports of a pool's replicas. waiting, waiting_tokens: as returned by `queue_of`."""
    reports: Any = context.raw_metrics or {}
    replicas = [replica for replica, points in reports.get("running", {}).items() if points]
    return PoolLoad(
        target_replicas=context.target_num_replicas,
        running_replicas=context.current_num_replicas,
        replicas=[_replica_load(reports, replica) for replica in replicas],
        waiting=waiting + math.ceil(context.total_queued_requests or 0),
        waiting_tokens=waiting_tokens,
    )


def queue_of(ingresses: Sequence[AutoscalingContext], model: str) -> tuple[int, int]:
    """Return the sequences waiting in all ingress replicas, and their prompt tokens."""

    def total(name: str) -> int:
        found = [points for context in ingresses for points in (context.raw_metrics or {}).get(name, {}).values()]
        return sum(int(points[-1].value) for points in found if points)

    return total(waiting_of(model)), total(waiting_tokens_of(model))


def _replica_load(reports: Mapping[str, Mapping[Any, Sequence[Any]]], replica: object) -> ReplicaLoad:
    """Return the load of a replica. reports: for each name and replica, the points of the last few seconds, oldest
    first."""

    def last(name: str) -> float:
        return _newest(reports, name, replica)

    def risen(name: str) -> float:
        points = reports[name][replica]
        return max(0.0, points[-1].value - points[0].value)

    points = reports["running"][replica]
    window_s = max(points[-1].timestamp - points[0].timestamp, MIN_WINDOW_S)
    return ReplicaLoad(
        running=int(last("running")),
        receiving=int(last("receiving")),
        waiting=int(last("waiting")),
        queued_tokens=int(last("queued_tokens")),
        prefill_tokens_per_s=risen("prefill_tokens_total") / window_s,
        cached_tokens_per_s=risen("cached_tokens_total") / window_s,
        prefills_per_s=risen("prefills_total") / window_s,
        spilled_fraction=risen("spilled_total") / max(1.0, risen("local_total")),
        output_tokens_per_s=risen("output_tokens_total") / window_s,
        itl_s=risen("itl_s_total") / max(1.0, risen("itl_total")),
        blocks_used=int(last("blocks_used")),
        blocks_total=int(last("blocks_total")),
        costs=EngineCosts(
            decode_step_s=last("decode_step_s"),
            decode_sequence_s=last("decode_sequence_s"),
            token_s=last("token_s"),
        ),
    )


def _newest(reports: Mapping[str, Mapping[Any, Sequence[Any]]], name: str, replica: object) -> float:
    """Return the newest value of a report. A replica of another version may lack it if it has a default. Raises
    KeyError."""
    points = reports.get(name, {}).get(replica)
    value: float = points[-1].value if points else DEFAULTS[name]
    return value


# -- decisions out -------------------------------------------------------------------------------------------


class ScalingMetrics:
    """Publishes decisions. Every decision goes to the metrics; a change also goes to the log of Serve's controller and
    to the console. While a pool has work and keeps its number of replicas, the log says once a minute why.

    Ray exports the metrics on its own port, under names that begin with ray_ (docs/autoscaling.md).
    """

    def __init__(self) -> None:
        self._replicas = Gauge("manta_autoscaling_desired_replicas", "Replicas that the pool should have.", POOL_TAGS)
        self._running = Gauge("manta_autoscaling_running_replicas", "Replicas that are up.", POOL_TAGS)
        self._desired = Gauge(
            "manta_autoscaling_wished_replicas",
            "Replicas that the current load needs, without delays for stability.",
            POOL_TAGS,
        )
        self._min = Gauge("manta_autoscaling_min_replicas", "Minimum number of replicas.", POOL_TAGS)
        self._max = Gauge("manta_autoscaling_max_replicas", "Maximum number of replicas.", POOL_TAGS)
        self._input = Gauge("manta_autoscaling_input", "Figures that decide.", (*POOL_TAGS, "input"))
        self._changes = Counter(
            "manta_autoscaling_changes", "Changes of the desired replicas.", (*POOL_TAGS, "direction", "reason")
        )
        self._cost = Gauge(
            "manta_autoscaling_cost_per_hour", "Money for an hour of the replicas that the pool should have.", POOL_TAGS
        )
        self._last: dict[tuple[str, str], int] = {}
        self._logged_at: dict[tuple[str, str], float] = {}
        self._newest: deque[ScalingChange] = deque(maxlen=NUM_SHARED_CHANGES)

    def record(self, pool: PoolSettings, before: int, decision: ScalingDecision, now: float) -> None:
        """Record a decision. before: number of replicas that the previous decision asked for. now: seconds of any
        clock."""
        tags = {"model_name": pool.model, "pool": pool.role}
        self._replicas.set(decision.replicas, tags)
        self._running.set(decision.inputs["running_replicas"], tags)
        self._desired.set(decision.desired, tags)
        self._min.set(pool.limits.min_replicas, tags)
        self._max.set(pool.limits.max_replicas, tags)
        cost_per_hour = pool.replica_hour * decision.replicas
        if pool.replica_hour:
            self._cost.set(cost_per_hour, tags)
        for name, value in decision.inputs.items():
            self._input.set(value, {**tags, "input": name})
        key = pool.model, pool.role
        before = self._last.get(key, before)  # ours: Serve scales to zero through one
        self._last[key] = decision.replicas
        if decision.replicas == before:
            if decision.inputs["sequences"] and now - self._logged_at.get(key, -math.inf) >= STEADY_LOG_INTERVAL_S:
                self._log(pool, f"stays at {before} replicas", decision, now)
            return
        direction = "up" if decision.replicas > before else "down"
        self._changes.inc(1, {**tags, "direction": direction, "reason": decision.reason})
        saved_per_hour = pool.replica_hour * (before - decision.replicas)
        self._newest.append(
            ScalingChange(
                at=time.time(),
                model=pool.model,
                pool=pool.role,
                before=before,
                after=decision.replicas,
                reason=decision.reason,
                desired=decision.desired,
                inputs=decision.inputs,
                cost_per_hour=cost_per_hour,
                saved_per_hour=saved_per_hour,
            )
        )
        ray_compat.share(ray_compat.SCALING_CHANGES, msgspec.msgpack.encode(list(self._newest)))
        costs = f" cost_per_hour={cost_per_hour:.2f} saved_per_hour={saved_per_hour:.2f}" if pool.replica_hour else ""
        self._log(pool, f"from {before} to {decision.replicas} replicas", decision, now, costs)

    def _log(self, pool: PoolSettings, what: str, decision: ScalingDecision, now: float, costs: str = "") -> None:
        self._logged_at[pool.model, pool.role] = now
        targets = f"ttft_ms={pool.slo.ttft_ms:g} itl_ms={pool.slo.itl_ms:g}"
        inputs = " ".join(f"{name}={value:.4g}" for name, value in decision.inputs.items())
        logger.info(
            f"autoscaling {pool.role}-{pool.model} {what}: "
            f"reason={decision.reason} desired={decision.desired} {targets} {inputs}{costs}"
        )
