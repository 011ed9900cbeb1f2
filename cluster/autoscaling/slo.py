"""The targets and limits of autoscaling, and how they reach the policy in Serve's controller. Pure Python."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from deployments.routing.config import Role

METRICS_PERIOD_S = 1.0  # how often replicas and handles report
LOOK_BACK_S = 5.0  # how much of those reports Serve keeps
POLICY = "manta:AutoscalingPolicy"
POLICIES = (POLICY, f"{__package__}.policy:Policy")  # the same class by its own name


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency targets of a model."""

    ttft_ms: float = 2000.0  #: to the first token of an answer, from when the engines could have it
    itl_ms: float = 100.0  #: from token to token


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds and delays for the number of replicas of one pool."""

    min_replicas: int
    max_replicas: int
    max_num_seqs: int  #: sequences that one replica runs at a time
    upscale_delay_s: float  #: how long more replicas must have been desired without a break
    downscale_delay_s: float  #: how long fewer replicas must have been desired without a break
    scale_to_zero_delay_s: float  #: how long there must have been no work; only where min_replicas is 0


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Everything the policy needs to know of one pool of a model.

    It travels in the deployment's own autoscaling configuration, so that `args` stays the one place where users set it.
    """

    model: str
    role: Role
    slo: Slo
    limits: Limits

    @classmethod
    def parse(cls, kwargs: dict[str, Any]) -> PoolSettings | None:
        """Read what `autoscaling_config` wrote. None for a deployment that is no pool: the ingress."""
        if not kwargs:
            return None
        return cls(kwargs["model"], kwargs["role"], Slo(**kwargs["slo"]), Limits(**kwargs["limits"]))


def autoscaling_config(low: int, high: int, full: int, pool: PoolSettings | None = None) -> dict[str, Any]:
    """Return a Serve deployment's autoscaling_config.

    low, high: bounds of the number of replicas.
    full: requests that fill one replica; Serve shows it, and our policy has no use for it.
    pool: goes into policy_kwargs, where our policy reads it; Serve itself hands them to deployments' own policies only.
    """
    return {
        "min_replicas": low,
        "max_replicas": high,
        "target_ongoing_requests": full,
        "metrics_interval_s": METRICS_PERIOD_S,
        "look_back_period_s": LOOK_BACK_S,
        "upscale_delay_s": 0.0,  # Serve's own delays would add to ours
        "downscale_delay_s": 0.0,
        "policy": {"policy_kwargs": {} if pool is None else asdict(pool)},
    }
