"""Every decision, for people: a line in the log of Serve's controller when something changes, and metrics always."""

from __future__ import annotations

import logging

from ray.util.metrics import Counter, Gauge

from cluster.autoscaling.pool import ScalingDecision
from cluster.autoscaling.settings import PoolSettings

logger = logging.getLogger("ray.serve.manta.autoscaling")  # below Serve's own, whose handlers it shares

OF_POOL = ("model_name", "pool")


class Exports:
    """The metrics leave by Ray's own port, under names that begin with ray_ (docs/autoscaling.md)."""

    def __init__(self) -> None:
        self._desired = Gauge("manta_autoscaling_desired_replicas", "Replicas that there should be.", OF_POOL)
        self._running = Gauge("manta_autoscaling_running_replicas", "Replicas that are up.", OF_POOL)
        self._wished = Gauge(
            "manta_autoscaling_wished_replicas", "As the load of now asks for, before delays.", OF_POOL
        )
        self._min = Gauge("manta_autoscaling_min_replicas", "The least that there may be.", OF_POOL)
        self._max = Gauge("manta_autoscaling_max_replicas", "The most that there may be.", OF_POOL)
        self._input = Gauge("manta_autoscaling_input", "What it is decided by.", (*OF_POOL, "input"))
        self._changes = Counter(
            "manta_autoscaling_changes", "Changes of the desired replicas.", (*OF_POOL, "direction", "reason")
        )
        self._last: dict[tuple[str, str], int] = {}

    def record(self, pool: PoolSettings, before: int, decision: ScalingDecision) -> None:
        """before: replicas that there should be so far."""
        tags = {"model_name": pool.model, "pool": pool.role}
        self._desired.set(decision.replicas, tags)
        self._running.set(decision.inputs["running_replicas"], tags)
        self._wished.set(decision.desired, tags)
        self._min.set(pool.limits.min_replicas, tags)
        self._max.set(pool.limits.max_replicas, tags)
        for name, value in decision.inputs.items():
            self._input.set(value, {**tags, "input": name})
        before = self._last.get((pool.model, pool.role), before)  # Serve goes down to zero by way of one
        self._last[pool.model, pool.role] = decision.replicas
        if decision.replicas == before:
            return
        direction = "up" if decision.replicas > before else "down"
        self._changes.inc(1, {**tags, "direction": direction, "reason": decision.reason})
        logger.info(line(pool, before, decision))


def line(pool: PoolSettings, before: int, decision: ScalingDecision) -> str:
    """For the log."""
    targets = f"ttft_ms={pool.slo.ttft_ms:g} itl_ms={pool.slo.itl_ms:g}"
    inputs = " ".join(f"{name}={value:.4g}" for name, value in decision.inputs.items())
    return (
        f"autoscaling {pool.role}-{pool.model} from {before} to {decision.replicas} replicas: "
        f"reason={decision.reason} desired={decision.desired} {targets} {inputs}"
    )
