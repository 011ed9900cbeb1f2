"""Places requests on engines, and remembers what that means for the next one. No clock, no socket, no Ray."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from deployments.routing.config import Role, RoutingConfig
from deployments.routing.cost import Candidate, Cost, Prompt
from deployments.routing.load_tracker import LoadTracker, PendingLoad
from deployments.routing.policies import Look, policy_of
from deployments.routing.prefix_index import PrefixIndex, keys_of
from deployments.routing.rendezvous import in_order_of
from deployments.routing.stats import Reason, RoutingStats
from engine.wire.messages import EngineUpdate

MAX_ESTIMATES = 4096  # that wait for what was really cached; only those whose engine is lost wait in vain


@dataclass(frozen=True, slots=True)
class Decision:
    """engines: best first; the request is charged to the first one. cached_tokens: that are expected to be there."""

    engines: list[str]
    reason: Reason
    cached_tokens: int


class Balancer:
    """One router's view of the engines of one pool.

    An engine that has just lost a request is suspect: it comes last until it has said something again. Else it would
    look idle, and draw all requests to itself.
    """

    def __init__(self, config: RoutingConfig, role: Role, block_size: int, rng: random.Random | None = None):
        self.book, self.index = LoadTracker(), PrefixIndex()
        self.stats = RoutingStats(config.policy)
        self._cost = Cost(block_size, config.prefix_weight, config.running_weight_of(role))
        self._policy = policy_of(config.policy, self._cost, rng or random.Random())
        self._numbers: dict[str, int] = {}  # of the newest news of each engine that was understood
        self._suspects: set[str] = set()
        self._estimates: dict[str, int] = {}  # by request: cached tokens
        self._unconfirmed: dict[str, str] = {}  # by request that has ended: its engine, which has not said so yet

    def choose(self, prompt: Prompt, engines: Sequence[str]) -> Decision:
        """engines: at least one. A second call for one request moves it: the first choice did not take it."""
        again = prompt.request_id in self._estimates
        self.end(prompt.request_id, confirmed=False)
        look = self._look(prompt)
        suspects = self._suspects.intersection(engines)
        sound = [engine for engine in engines if engine not in suspects] if suspects else engines
        ranked, reason = self._rank(prompt, sound or engines, look)
        if sound:
            ranked += suspects
        best = look(ranked[0])
        cached_tokens = self._cost.cached_tokens(prompt, best)
        charge = PendingLoad(best.engine, prompt.num_tokens - cached_tokens, self._cost.new_blocks(prompt, best))
        self.book.place(prompt.request_id, charge)
        self.index.expect(prompt.request_id, best.engine, prompt.keys[best.cached :])
        self._estimate(prompt.request_id, cached_tokens)
        if not again:
            self.stats.routed[reason] += 1
        return Decision(ranked, reason, cached_tokens)

    def count_in(self, stats: RoutingStats) -> None:
        """Count there from now on."""
        if stats is not self.stats:
            stats.policy, self.stats = self.stats.policy, stats

    def news(self, news: EngineUpdate) -> bool:
        """False if a message before this one is missing: a new snapshot is needed."""
        engine = news.engine_id
        self._suspects.discard(engine)
        self.book.report(engine, news.load, news.taken)
        for request_id, cached in news.settled:
            self._settle(request_id, cached)
        if news.snapshot:
            self.index.reset(engine, keys_of(news.stored))
            for request_id in [r for r, at in self._unconfirmed.items() if at == engine]:
                self._settle(request_id, -1)  # what was said of it is lost
        elif self._numbers.get(engine) == news.number - 1:
            self.index.update(engine, keys_of(news.stored), keys_of(news.removed))
        else:
            return False
        self._numbers[engine] = news.number
        return True

    def end(self, request_id: str, *, confirmed: bool) -> None:
        """The request has ended. confirmed: its engine had it, and so will say what became of its prompt: until then
        its blocks are expected there."""
        self.book.end(request_id)
        engine = self.index.expected_at(request_id)
        if engine is None:
            return
        if confirmed and engine in self._numbers:
            self._unconfirmed[request_id] = engine
        else:
            self._settle(request_id, -1)

    def suspect(self, engine: str) -> None:
        self._suspects.add(engine)

    def keep(self, engines: Iterable[str]) -> None:
        """These are all engines that there are; forget all others."""
        there = set(engines)
        for engine in [e for e in {*self._numbers, *self._suspects, *self.book.engines} if e not in there]:
            self.book.forget(engine)
            self.index.forget(engine)
            self._numbers.pop(engine, None)
            self._suspects.discard(engine)
            self._unconfirmed = {r: at for r, at in self._unconfirmed.items() if at != engine}

    def _look(self, prompt: Prompt) -> Look:
        cached = 0

        @cache
        def look(engine: str) -> Candidate:
            nonlocal cached
            cached = self.index.match(engine, prompt.keys, guess=cached)
            return Candidate(engine, self.book.load(engine), cached)

        return look

    def _rank(self, prompt: Prompt, engines: Sequence[str], look: Look) -> tuple[list[str], Reason]:
        moved = False
        if prompt.session:
            for home in in_order_of(prompt.session, engines):
                others = [engine for engine in engines if engine != home]
                if not self._cost.overloaded(prompt, look(home), [look(other) for other in others]):
                    rest = self._policy.rank(prompt, others, look)[0] if others else []
                    return [home, *rest], "session_moved" if moved else "session"
                moved = True
        ranked, reason = self._policy.rank(prompt, engines, look)
        return ranked, "session_moved" if moved else reason

    def _estimate(self, request_id: str, cached_tokens: int) -> None:
        self._estimates[request_id] = cached_tokens
        while len(self._estimates) > MAX_ESTIMATES:
            del self._estimates[next(iter(self._estimates))]

    def _settle(self, request_id: str, cached_tokens: int) -> None:
        """cached_tokens: -1 if that is not known."""
        self.index.settle(request_id)
        self._unconfirmed.pop(request_id, None)
        estimated = self._estimates.pop(request_id, None)
        if estimated is not None and cached_tokens >= 0:
            self.stats.settled(estimated, cached_tokens)
