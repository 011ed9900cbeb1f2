"""The order in which a prompt's engines come: holds and sessions first, then the policy. Pure: what it knows of engines
and random numbers is passed in."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.routing.cost import RoutingCost
from deployments.routing.policies import Lookup, Order, RoutingPolicy, rendezvous_order
from deployments.routing.prompt_digest import PromptDigest
from deployments.routing.stats import RoutingReason


class Ranker:
    def __init__(self, policy: RoutingPolicy, cost: RoutingCost, order: Order = rendezvous_order):
        self.policy, self._cost, self._order = policy, cost, order

    def rank(
        self, prompt: PromptDigest, engines: Sequence[str], home: str | None, lookup: Lookup
    ) -> tuple[list[str], RoutingReason]:
        """Return all engines, best first, and the reason for the best one. There is at least one engine. home: the one
        that holds the longest part of the prompt, if any does."""
        moved = False
        if home:
            others = [engine for engine in engines if engine != home]
            if not self._cost.overloaded(prompt, lookup(home), [lookup(other) for other in others]):
                return [home, *(self.policy.rank(prompt, others, lookup)[0] if others else [])], "held"
        if prompt.session:
            for home in self._order(prompt.session, engines):
                others = [engine for engine in engines if engine != home]
                if not self._cost.overloaded(prompt, lookup(home), [lookup(other) for other in others]):
                    rest = self.policy.rank(prompt, others, lookup)[0] if others else []
                    return [home, *rest], "session_moved" if moved else "session"
                moved = True
        ranked, reason = self.policy.rank(prompt, engines, lookup)
        return ranked, "session_moved" if moved else reason
