"""What one router counts."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from deployments.routing.config import PolicyName

# longest_prefix: no engine has more of the prompt. shorter_prefix: some other does. no_prefix: none has any of it.
# prefix_ignored: the policy does not look. session: where its session belongs. session_moved: elsewhere, since too much
# was to do there.
RoutingReason = Literal["longest_prefix", "shorter_prefix", "no_prefix", "prefix_ignored", "session", "session_moved"]


class RoutingStats(msgspec.Struct):
    """routed: requests, by reason.

    Of those requests whose engine has said what was cached: estimated_tokens, cached_tokens: what was expected to be
    cached, and what was. drift_tokens: the sum of how far the two were apart in each.
    """

    policy: PolicyName = "prefix_aware"
    routed: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(get_args(RoutingReason), 0))
    estimated_tokens: int = 0
    cached_tokens: int = 0
    drift_tokens: int = 0

    def record_estimate(self, estimated: int, cached: int) -> None:
        self.estimated_tokens += estimated
        self.cached_tokens += cached
        self.drift_tokens += abs(estimated - cached)
