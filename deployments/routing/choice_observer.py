"""What hears of a router's choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.routing.config import PolicyName, Role
from deployments.routing.cost import RoutingCost
from deployments.routing.policies import Lookup
from deployments.routing.prompt_digest import PromptDigest
from deployments.routing.stats import RoutingReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice of an engine, and what the router knew."""

    prompt: PromptDigest
    engines: Sequence[str]
    """Engines from which it chose."""
    unhealthy: Sequence[str]
    """Engines that came last, because they had just lost a request or are about to stop."""
    home: str | None
    """Engine that held a part of the prompt for a client."""
    ranked: Sequence[str]
    """The engines that could take the request, best first."""
    reason: RoutingReason
    cached_tokens: int
    holder: str
    """Engine from which the chosen one may fetch KV; empty for none."""
    moves: bool
    """Whether another engine had been chosen for it before, and did not take it."""


class ChoiceObserver:
    """All methods do nothing by default, so that an observer overrides what it needs."""

    def watch(self, role: Role, policy: PolicyName, cost: RoutingCost) -> None:
        """It hears of a router with these properties from now on."""

    def begin(self, lookup: Lookup, memory: str) -> Lookup:
        """A choice begins. Returns the lookup that is to be used for it. memory: that of the policy."""
        return lookup

    def drawn(self, number: int) -> None:
        """The policy has drawn a random number for this choice."""

    def ordered(self, engines: list[str]) -> None:
        """Equal engines have an order that depends on the prompt or the session."""

    def chosen(self, choice: Choice) -> None:
        """The choice is made."""
