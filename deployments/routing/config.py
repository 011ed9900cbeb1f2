"""Routing options in serve_config.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.config_options import check_limits, option
from engine.options.choices import check_choices

PolicyName = Literal["prefix_aware", "power_of_two", "round_robin"]
Role = Literal["decode", "prefill", "encode"]

RUNNING_WEIGHT = {"decode": 0.25, "prefill": 0.0, "encode": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """Options for choosing among the replicas of one pool (docs/routing.md)."""

    policy: PolicyName = option(
        "prefix_aware",
        "`prefix_aware` picks the replica where a request costs least, `power_of_two` the less busy of two random "
        "replicas, `round_robin` each in turn.",
    )
    # 2: computing a block delays the request itself once, and the requests queued behind it once more
    prefix_weight: float = option(
        2.0,
        "Cost of computing a block of the prompt, relative to a block that is queued before it. Larger values favour "
        "cached prefixes; 0 considers load only.",
    )
    # twice the cost of loading one: it evicts another adapter, which a later request has to load again
    adapter_weight: float = option(
        32.0,
        "Cost of loading a LoRA adapter that an engine lacks, in blocks of prompt; 0 ignores adapters.",
    )
    running_weight: float | None = option(
        None, "Cost of a KV block that other requests use. Default: 0.25 in a decode pool, 0 in a prefill pool."
    )

    def __post_init__(self) -> None:
        check_choices(self, "routing.")
        check_limits(self, {"at least 0": "prefix_weight adapter_weight running_weight"}, "routing.")

    def running_weight_of(self, role: Role) -> float:
        return RUNNING_WEIGHT[role] if self.running_weight is None else self.running_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """What the routers of a deployment's handles are given."""

    block_size: int
    pools: dict[Role, RoutingConfig]  #: by the role of a call
