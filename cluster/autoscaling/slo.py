"""What autoscaling aims at, and how it is told of it. Pure Python."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from deployments.routing.config import Role

METRICS_PERIOD_S = 1.0  # how often replicas and handles report
LOOK_BACK_S = 5.0  # of what Serve keeps of those reports
NO_DELAY_S = 0.0  # Serve's own delays would come on top of ours
POLICY = "cluster.autoscaling.policy:Policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """ttft_ms: to the first token of an answer, from when the engines could have it. itl_ms: from token to token."""

    ttft_ms: float = 2000.0
    itl_ms: float = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one pool.

    max_num_seqs: sequences that one replica runs at once.
    upscale_delay_s, downscale_delay_s: for so long more, or fewer, replicas must have been wanted all the time.
    scale_to_zero_delay_s: without any work; only where min_replicas is 0.
    """

    min_replicas: int
    max_replicas: int
    max_num_seqs: int
    upscale_delay_s: float
    downscale_delay_s: float
    scale_to_zero_delay_s: float


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Of one pool of a model."""

    model: str
    role: Role
    slo: Slo
    limits: Limits

    @classmethod
    def parse(cls, kwargs: dict[str, Any]) -> PoolSettings | None:
        """None for a deployment that is no pool: the ingress."""
        if not kwargs:
            return None
        return cls(kwargs["model"], kwargs["role"], Slo(**kwargs["slo"]), Limits(**kwargs["limits"]))


def autoscaling_config(low: int, high: int, full: int, pool: PoolSettings | None = None) -> dict[str, Any]:
    """Of a Serve deployment. full: requests that fill one replica; Serve shows it, and our policy has no use for it.

    Serve hands its policy_kwargs to nobody, since the application's policy takes the place of the deployment's; but
    there they can be read.
    """
    return {
        "min_replicas": low,
        "max_replicas": high,
        "target_ongoing_requests": full,
        "metrics_interval_s": METRICS_PERIOD_S,
        "look_back_period_s": LOOK_BACK_S,
        "upscale_delay_s": NO_DELAY_S,
        "downscale_delay_s": NO_DELAY_S,
        "policy": {"policy_kwargs": {} if pool is None else asdict(pool)},
    }
