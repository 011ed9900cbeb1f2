"""Which of several engines a request should go to. Pure: what is known of the engines is given, and so is chance."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from deployments.routing.config import PolicyName
from deployments.routing.cost import Candidate, Cost, Prompt
from deployments.routing.rendezvous import in_order_of


class Policy(Protocol):
    def rank(self, prompt: Prompt, candidates: Sequence[Candidate]) -> list[Candidate]:
        """All of the candidates, of which there is at least one; the best first."""


class PrefixAware:
    """Where the request costs least. One where it would have to wait for others to end comes after all where not."""

    def __init__(self, cost: Cost):
        self._cost = cost

    def rank(self, prompt: Prompt, candidates: Sequence[Candidate]) -> list[Candidate]:
        costs = {c.engine: (self._cost.would_wait(prompt, c), self._cost.total(prompt, c)) for c in candidates}
        ranked = sorted(candidates, key=lambda c: costs[c.engine])
        equal = bisect_right(ranked, costs[ranked[0].engine], key=lambda c: costs[c.engine])
        if equal > 1:  # where nobody knows better, prompts that begin alike go together, from all ingresses
            start = str(prompt.keys[0]) if prompt.keys else prompt.request_id
            best = in_order_of(start, [c.engine for c in ranked[:equal]])[0]
            ranked.sort(key=lambda c: c.engine != best)
        return ranked


class PowerOfTwo:
    """Of two at random the one with fewer sequences; then the other, then the rest.

    M. Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001.
    """

    def __init__(self, rng: random.Random):
        self._rng = rng

    def rank(self, prompt: Prompt, candidates: Sequence[Candidate]) -> list[Candidate]:
        shuffled = self._rng.sample(candidates, len(candidates))
        return [*sorted(shuffled[:2], key=lambda c: c.load.sequences), *shuffled[2:]]


class RoundRobin:
    """By name, each after the one before; whoever comes or goes changes nothing for the others."""

    def __init__(self) -> None:
        self._last = ""

    def rank(self, prompt: Prompt, candidates: Sequence[Candidate]) -> list[Candidate]:
        ordered = sorted(candidates, key=lambda c: c.engine)
        first = bisect_right(ordered, self._last, key=lambda c: c.engine)
        ranked = ordered[first:] + ordered[:first]
        self._last = ranked[0].engine
        return ranked


def policy_of(name: PolicyName, cost: Cost, rng: random.Random) -> Policy:
    match name:
        case "prefix_aware":
            return PrefixAware(cost)
        case "power_of_two":
            return PowerOfTwo(rng)
        case "round_robin":
            return RoundRobin()
