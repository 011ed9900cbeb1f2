"""Places requests on engines, and remembers what that means for the next one. No clock, no socket, no Ray."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from deployments.routing.config import Role, RoutingConfig
from deployments.routing.cost import EngineCandidate, PromptDigest, RoutingCost
from deployments.routing.load_tracker import LoadTracker, PendingLoad
from deployments.routing.policies import Lookup, make_policy
from deployments.routing.prefix_index import PrefixIndex, block_keys
from deployments.routing.rendezvous import rendezvous_order
from deployments.routing.stats import RoutingReason, RoutingStats
from engine.wire.messages import EngineUpdate

MAX_ESTIMATES = 4096  # that wait for what was really cached; only those whose engine is lost wait in vain


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """engines: best first; the request is charged to the first one. cached_tokens: that are expected to be there."""

    engines: list[str]
    reason: RoutingReason
    cached_tokens: int


class Balancer:
    """One router's view of the engines of one pool.

    An engine that has just lost a request counts as unhealthy: it comes last until it reports again. Else it would
    look idle, and draw all requests to itself.
    """

    def __init__(self, config: RoutingConfig, role: Role, block_size: int, rng: random.Random | None = None):
        self.loads, self.index = LoadTracker(), PrefixIndex()
        self.stats = RoutingStats(config.policy)
        self._cost = RoutingCost(block_size, config.prefix_weight, config.running_weight_of(role))
        self._policy = make_policy(config.policy, self._cost, rng or random.Random())
        self._numbers: dict[str, int] = {}  # of the newest update of each engine that was understood
        self._unhealthy: set[str] = set()
        self._estimates: dict[str, int] = {}  # by request: cached tokens
        self._unconfirmed: dict[str, str] = {}  # by request that has ended: its engine, which has not said so yet

    def choose(self, prompt: PromptDigest, engines: Sequence[str]) -> RoutingDecision:
        """engines: at least one. A second call for one request moves it: the first choice did not take it."""
        again = prompt.request_id in self._estimates
        self.end(prompt.request_id, confirmed=False)
        lookup = self._make_lookup(prompt)
        unhealthy = self._unhealthy.intersection(engines)
        healthy = [engine for engine in engines if engine not in unhealthy] if unhealthy else engines
        ranked, reason = self._rank(prompt, healthy or engines, lookup)
        if healthy:
            ranked += unhealthy
        best = lookup(ranked[0])
        cached_tokens = self._cost.cached_tokens(prompt, best)
        pending = PendingLoad(best.engine, prompt.num_tokens - cached_tokens, self._cost.new_blocks(prompt, best))
        self.loads.place(prompt.request_id, pending)
        self.index.expect(prompt.request_id, best.engine, prompt.keys[best.cached :])
        self._estimate(prompt.request_id, cached_tokens)
        if not again:
            self.stats.routed[reason] += 1
        return RoutingDecision(ranked, reason, cached_tokens)

    def use_stats(self, stats: RoutingStats) -> None:
        """Count there from now on."""
        if stats is not self.stats:
            stats.policy, self.stats = self.stats.policy, stats

    def update(self, update: EngineUpdate) -> bool:
        """False if a message before this one is missing: a new snapshot is needed."""
        engine = update.engine_id
        self._unhealthy.discard(engine)
        self.loads.report(engine, update.load, update.admitted)
        for request_id, cached in update.prefilled:
            self._resolve(request_id, cached)
        if update.snapshot:
            self.index.reset(engine, block_keys(update.stored))
            for request_id in [r for r, at in self._unconfirmed.items() if at == engine]:
                self._resolve(request_id, -1)  # what was said of it is lost
        elif self._numbers.get(engine) == update.number - 1:
            self.index.update(engine, block_keys(update.stored), block_keys(update.removed))
        else:
            return False
        self._numbers[engine] = update.number
        return True

    def end(self, request_id: str, *, confirmed: bool) -> None:
        """The request has ended. confirmed: its engine had it, and so will say what became of its prompt: until then
        its blocks are expected there."""
        self.loads.end(request_id)
        engine = self.index.expected_at(request_id)
        if engine is None:
            return
        if confirmed and engine in self._numbers:
            self._unconfirmed[request_id] = engine
        else:
            self._resolve(request_id, -1)

    def mark_unhealthy(self, engine: str) -> None:
        self._unhealthy.add(engine)

    def keep(self, engines: Iterable[str]) -> None:
        """These are all engines that there are; forget all others."""
        there = set(engines)
        for engine in [e for e in {*self._numbers, *self._unhealthy, *self.loads.engines} if e not in there]:
            self.loads.forget(engine)
            self.index.forget(engine)
            self._numbers.pop(engine, None)
            self._unhealthy.discard(engine)
            self._unconfirmed = {r: at for r, at in self._unconfirmed.items() if at != engine}

    def _make_lookup(self, prompt: PromptDigest) -> Lookup:
        cached = 0

        @cache
        def lookup(engine: str) -> EngineCandidate:
            nonlocal cached
            cached = self.index.match(engine, prompt.keys, guess=cached)
            return EngineCandidate(engine, self.loads.load(engine), cached)

        return lookup

    def _rank(self, prompt: PromptDigest, engines: Sequence[str], lookup: Lookup) -> tuple[list[str], RoutingReason]:
        moved = False
        if prompt.session:
            for home in rendezvous_order(prompt.session, engines):
                others = [engine for engine in engines if engine != home]
                if not self._cost.overloaded(prompt, lookup(home), [lookup(other) for other in others]):
                    rest = self._policy.rank(prompt, others, lookup)[0] if others else []
                    return [home, *rest], "session_moved" if moved else "session"
                moved = True
        ranked, reason = self._policy.rank(prompt, engines, lookup)
        return ranked, "session_moved" if moved else reason

    def _estimate(self, request_id: str, cached_tokens: int) -> None:
        self._estimates[request_id] = cached_tokens
        while len(self._estimates) > MAX_ESTIMATES:
            del self._estimates[next(iter(self._estimates))]

    def _resolve(self, request_id: str, cached_tokens: int) -> None:
        """cached_tokens: -1 if that is not known."""
        self.index.resolve(request_id)
        self._unconfirmed.pop(request_id, None)
        estimated = self._estimates.pop(request_id, None)
        if estimated is not None and cached_tokens >= 0:
            self.stats.record_estimate(estimated, cached_tokens)
