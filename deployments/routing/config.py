"""How requests find their engine: what serve_config.yaml says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from engine.errors import ConfigError

PolicyName = Literal["prefix_aware", "power_of_two", "round_robin"]
Role = Literal["decode", "prefill"]

RUNNING_WEIGHT = {"decode": 0.25, "prefill": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """How the replicas of one pool are chosen (docs/routing.md).

    policy: `prefix_aware` takes the one where a request costs least; `power_of_two` the less busy of two at random;
        `round_robin` one after the other.
    prefix_weight: what a block of the prompt costs that has to be computed, where a block that is queued before it
        costs 1. Larger values follow the cache, 0 looks at load only. 2: who computes it waits for it once, and
        whoever comes after it once more.
    running_weight: what a KV block costs that is in use by others. None means 0.25 where answers are computed, and 0
        where only prompts are.
    """

    policy: PolicyName = "prefix_aware"
    prefix_weight: float = 2.0
    running_weight: float | None = None

    def __post_init__(self) -> None:
        if self.policy not in get_args(PolicyName):
            raise ConfigError("routing.policy", self.policy, f"one of {', '.join(get_args(PolicyName))}")
        for key in ("prefix_weight", "running_weight"):
            weight = getattr(self, key)
            if weight is not None and not 0 <= weight < float("inf"):
                raise ConfigError(f"routing.{key}", weight, "at least 0")

    def running_weight_of(self, role: Role) -> float:
        return RUNNING_WEIGHT[role] if self.running_weight is None else self.running_weight
