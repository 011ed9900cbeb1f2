"""The application's autoscaling policy, as Serve calls it: `autoscaling_policy` in serve_config.yaml names it."""

from __future__ import annotations

import logging
import time
from typing import Any

from cluster.autoscaling.exports import Exports
from cluster.autoscaling.model import ModelScaler, PoolState
from cluster.autoscaling.reports import pool_load, queue_of
from cluster.autoscaling.settings import PoolSettings

logger = logging.getLogger("ray.serve.manta.autoscaling")

PERIOD_S = 1.0  # between decisions; Serve asks ten times as often
COMPLAIN_S = 60.0


class Policy:
    """Lives in Serve's controller, which makes one when the application is deployed, and calls it in its control loop.

    It never raises: that would stop the loop for all applications. While it cannot decide, all stays as it is.
    """

    def __init__(self) -> None:
        self._exports = Exports()
        self._scalers: dict[str, ModelScaler] = {}
        self._settings: dict[str, list[PoolSettings]] = {}
        self._decided: dict[Any, int] = {}
        self._due = self._complain_at = 0.0

    def __call__(self, contexts: dict[Any, Any]) -> tuple[dict[Any, int], None]:
        """contexts: Serve's AutoscalingContext of each deployment that is autoscaled, by its DeploymentID."""
        now = time.monotonic()
        if now >= self._due or contexts.keys() != self._decided.keys():
            self._due = now + PERIOD_S
            try:
                self._decided = self._decide(contexts, now)
            except Exception:  # of whatever kind: see above
                self._decided = {name: context.target_num_replicas for name, context in contexts.items()}
                if now >= self._complain_at:
                    self._complain_at = now + COMPLAIN_S
                    logger.exception("autoscaling cannot decide, so all stays as it is")
        return self._decided, None

    def _decide(self, contexts: dict[Any, Any], now: float) -> dict[Any, int]:
        decided = {name: context.target_num_replicas for name, context in contexts.items()}
        pools = {name: PoolSettings.parse(context.config.policy.policy_kwargs) for name, context in contexts.items()}
        fronts = [contexts[name] for name, pool in pools.items() if pool is None]
        for model in {pool.model for pool in pools.values() if pool is not None}:
            ours = {name: pool for name, pool in pools.items() if pool is not None and pool.model == model}
            queues = [queue_of(front, model) for front in fronts]
            waiting, waiting_tokens = sum(n for n, _ in queues), sum(tokens for _, tokens in queues)
            states = {
                pool.role: PoolState(
                    load=pool_load(contexts[name], *((waiting, waiting_tokens) if pool.role == "decode" else ())),
                    current=contexts[name].target_num_replicas,
                )
                for name, pool in ours.items()
            }
            decisions = self._scaler(model, list(ours.values())).decide(states, now)
            for name, pool in ours.items():
                decision = decisions[pool.role]
                self._exports.record(pool, contexts[name].target_num_replicas, decision)
                decided[name] = decision.replicas
        return decided

    def _scaler(self, model: str, pools: list[PoolSettings]) -> ModelScaler:
        """Made anew when its settings change."""
        if self._settings.get(model) != pools:
            self._settings[model] = pools
            self._scalers[model] = ModelScaler(pools[0].slo, {pool.role: pool.limits for pool in pools})
        return self._scalers[model]
