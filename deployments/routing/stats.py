"""Counters of one router."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from deployments.routing.config import PolicyName

# longest_prefix: no engine has more of the prompt. shorter_prefix: another one has. no_prefix: none has any of it.
# prefix_ignored: the policy ignores prefixes. session: the engine of the request's session. session_moved: another one,
# because that engine is overloaded. held: the engine keeps the prompt for its client.
RoutingReason = Literal[
    "longest_prefix", "shorter_prefix", "no_prefix", "prefix_ignored", "session", "session_moved", "held"
]


class RoutingStats(msgspec.Struct):
    """Routing totals. Token totals cover only requests whose cached tokens an engine has reported."""

    policy: PolicyName = "prefix_aware"
    routed: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(get_args(RoutingReason), 0))
    adapters: dict[str, int] = msgspec.field(default_factory=lambda: {"held": 0, "to_load": 0})
    """Requests with a LoRA adapter, by whether their engine had the adapter already or had to load it."""
    holds_broken: int = 0  #: holds whose engine stopped before they ended
    estimated_tokens: int = 0  #: prompt tokens that were expected to be cached
    cached_tokens: int = 0  #: prompt tokens that were cached
    drift_tokens: int = 0  #: sum over requests of the absolute difference of the two

    def record_estimate(self, estimated: int, cached: int) -> None:
        self.estimated_tokens += estimated
        self.cached_tokens += cached
        self.drift_tokens += abs(estimated - cached)
