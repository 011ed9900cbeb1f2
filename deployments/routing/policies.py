"""Policies that rank the engines for a prompt. Pure functions: engine states and random numbers are passed in."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from deployments.routing.config import PolicyName
from deployments.routing.cost import EngineCandidate, RoutingCost
from deployments.routing.prompt_digest import PromptDigest
from deployments.routing.stats import RoutingReason

Lookup = Callable[[str], EngineCandidate]
"""Returns the candidate for an engine's name. This takes time, so policies call it only for engines that they
compare."""


Order = Callable[[str, Iterable[str]], list[str]]
"""Orders engines by a key (rendezvous_order)."""


def rendezvous_order(key: str, engines: Iterable[str]) -> list[str]:
    """Return the engines in an order that depends only on the key and their names, so it is the same in every process.

    When an engine is removed, only its own keys move, spread evenly over the other engines. A new engine takes an equal
    share of the keys of each other engine. Highest random weight hashing: Thaler and Ravishankar, A Name-Based Mapping
    Scheme for Rendezvous, 1996.
    """
    seed = hashlib.blake2b(key.encode(), digest_size=16).digest()  # hashed, since blake2b limits the length of its key
    return sorted(engines, key=lambda engine: (hashlib.blake2b(engine.encode(), key=seed).digest(), engine))


class RandomNumbers(Protocol):
    def randrange(self, start: int, stop: int | None = None) -> int:
        """Return a number below `start`, or from `start` to below `stop`."""


class RoutingPolicy(Protocol):
    memory: str
    """What it remembers of earlier choices."""

    def rank(self, prompt: PromptDigest, engines: Sequence[str], lookup: Lookup) -> tuple[list[str], RoutingReason]:
        """Return all engines, best first, and the reason for the best one. There is at least one engine."""


class PrefixAware:
    """Prefers the engine where the request costs least. Engines where it would have to wait for other requests come
    last."""

    memory = ""

    def __init__(self, cost: RoutingCost, order: Order = rendezvous_order):
        self._cost, self._order = cost, order

    def rank(self, prompt: PromptDigest, engines: Sequence[str], lookup: Lookup) -> tuple[list[str], RoutingReason]:
        candidates = [lookup(engine) for engine in engines]
        costs = {c.engine: (self._cost.would_wait(prompt, c), self._cost.total(prompt, c)) for c in candidates}
        ranked = sorted(engines, key=costs.__getitem__)
        equal = bisect_right(ranked, costs[ranked[0]], key=costs.__getitem__)
        if (
            equal > 1
        ):  # all else being equal, all ingresses send one adapter's prompts, or those that begin alike, to one engine
            start = prompt.adapter or (str(prompt.keys[0]) if prompt.keys else prompt.request_id)
            best = self._order(start, ranked[:equal])[0]
            ranked.sort(key=lambda engine: engine != best)
        longest = max(c.cached for c in candidates)
        if not longest:
            return ranked, "no_prefix"
        return ranked, "longest_prefix" if lookup(ranked[0]).cached == longest else "shorter_prefix"


class PowerOfTwo:
    """Prefers, of two random engines, the engine with fewer sequences. The other of the two comes next, then the rest.

    M. Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001.
    """

    memory = ""

    def __init__(self, rng: RandomNumbers):
        self._rng = rng

    def rank(self, prompt: PromptDigest, engines: Sequence[str], lookup: Lookup) -> tuple[list[str], RoutingReason]:
        start = self._rng.randrange(len(engines))
        ranked = [*engines[start:], *engines[:start]]
        if len(ranked) > 1:
            other = self._rng.randrange(1, len(ranked))
            ranked[1], ranked[other] = ranked[other], ranked[1]
            ranked[:2] = sorted(ranked[:2], key=lambda engine: lookup(engine).load.sequences)
        return ranked, "prefix_ignored"


class RoundRobin:
    """Takes engines in turn, in the order of their names, also while engines are added and removed."""

    def __init__(self) -> None:
        self.memory = ""  # the last engine

    def rank(self, prompt: PromptDigest, engines: Sequence[str], lookup: Lookup) -> tuple[list[str], RoutingReason]:
        ordered = sorted(engines)
        first = bisect_right(ordered, self.memory)
        ranked = ordered[first:] + ordered[:first]
        self.memory = ranked[0]
        return ranked, "prefix_ignored"


def make_policy(
    name: PolicyName, cost: RoutingCost, rng: RandomNumbers, order: Order = rendezvous_order
) -> RoutingPolicy:
    match name:
        case "prefix_aware":
            return PrefixAware(cost, order)
        case "power_of_two":
            return PowerOfTwo(rng)
        case "round_robin":
            return RoundRobin()
