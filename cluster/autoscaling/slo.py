"""Targets and limits of autoscaling, and how they reach the policy in Serve's controller. Pure Python."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from deployments.routing.config import Role

METRICS_PERIOD_S = 1.0  # between reports of replicas and handles
LOOK_BACK_S = 5.0  # of reports that Serve keeps
POLICY = "manta:AutoscalingPolicy"
POLICIES = (POLICY, f"{__package__}.policy:Policy")  # the same class by its own name


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency targets of a model."""

    ttft_ms: float = 2000.0  #: time to the first token, from when the engines could have the request
    itl_ms: float = 100.0  #: time from token to token


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds and delays for the number of replicas of one pool."""

    min_replicas: int
    max_replicas: int
    max_num_seqs: int  #: sequences that one replica runs at a time
    upscale_delay_s: float  #: time for which more replicas must have been desired continuously
    downscale_delay_s: float  #: time for which fewer replicas must have been desired continuously
    scale_to_zero_delay_s: float  #: time without any work before the pool scales to zero; only if min_replicas is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSettings:
    """Further settings that the policy needs for a pool whose replicas change roles."""

    prefill: Limits  #: limits of the role `prefill`; PoolSettings has those of `decode`
    min_total: int  #: bounds of the number of replicas of both roles
    max_total: int
    initial_prefill: int  #: replicas that compute prompts until the load requires another number


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Everything that the policy needs to know about one pool.

    Users set it only in `args`; Serve passes it to the policy in the deployment's autoscaling configuration.
    """

    model: str
    role: Role
    slo: Slo
    limits: Limits
    roles: RoleSettings | None = None  #: None unless replicas change roles
    replica_hour: float = 0.0  #: money for an hour of a replica; 0 without prices

    @classmethod
    def parse(cls, kwargs: dict[str, Any]) -> PoolSettings | None:
        """Return the settings that `autoscaling_config` wrote; None for the ingress, which is not a pool."""
        return msgspec.convert(kwargs, cls) if kwargs else None


def autoscaling_config(low: int, high: int, full: int, pool: PoolSettings | None = None) -> dict[str, Any]:
    """Return the autoscaling_config of a Serve deployment.

    low, high: bounds of the number of replicas.
    full: number of requests that fill a replica. Serve displays it; our policy ignores it.
    pool: settings that our policy reads from policy_kwargs; Serve passes those only to a deployment's own policy.
    """
    return {
        "min_replicas": low,
        "max_replicas": high,
        "target_ongoing_requests": full,
        "metrics_interval_s": METRICS_PERIOD_S,
        "look_back_period_s": LOOK_BACK_S,
        "upscale_delay_s": 0.0,  # 0, since Serve's delays would add to ours
        "downscale_delay_s": 0.0,
        "policy": {"policy_kwargs": {} if pool is None else asdict(pool)},
    }
