"""The scaling of a model's pools together. Pure Python: whoever calls brings the time, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.autoscaling.load import PoolLoad
from cluster.autoscaling.pool import PoolScaler, ScalingDecision
from cluster.autoscaling.targets import Limits, Slo
from deployments.routing.config import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """current: replicas that there should be so far."""

    load: PoolLoad
    current: int


class ModelScaler:
    """A pool that answers requests, and perhaps one that computes prompts for it.

    Without a prefill pool, the first one answers for the time to the first token as well.
    """

    def __init__(self, slo: Slo, limits: dict[Role, Limits]):
        """limits: of all its pools. One of a fixed size has min_replicas equal to max_replicas."""
        alone = "prefill" not in limits
        self._scalers = {
            role: PoolScaler(slo, limit, prompts=alone or role == "prefill", decodes=role == "decode")
            for role, limit in limits.items()
        }

    def decide(self, pools: dict[Role, PoolState], now: float) -> dict[Role, ScalingDecision]:
        """One decision per pool of `pools`."""
        decisions: dict[Role, ScalingDecision] = {}
        for role, pool in pools.items():
            spilled = self._spilled_prefill_share(pools) if role == "prefill" else 0.0
            decisions[role] = self._scalers[role].decide(pool.load, pool.current, now, spilled)
        return decisions

    def _spilled_prefill_share(self, pools: dict[Role, PoolState]) -> float:
        """Engine-seconds per second that decode replicas spend on prompts for which the prefill pool had no room."""
        if "decode" not in pools:
            return 0.0
        token_s = self._scalers["prefill"].costs.token_s or self._scalers["decode"].costs.token_s
        spilled_per_s = sum(r.prefill_tokens_per_s * r.spilled_fraction for r in pools["decode"].load.replicas)
        return spilled_per_s * token_s
