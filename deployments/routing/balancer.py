"""Chooses an engine for each request, and keeps the state for later choices. Uses no clock, no socket and no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from deployments.routing.choice_observer import Choice, ChoiceObserver
from deployments.routing.config import Role, RoutingConfig
from deployments.routing.cost import EngineCandidate, RoutingCost
from deployments.routing.placements import UNKNOWN, Placement, Placements
from deployments.routing.policies import Lookup, RandomNumbers, make_policy, rendezvous_order
from deployments.routing.prompt_digest import PromptDigest
from deployments.routing.ranking import Ranker
from deployments.routing.stats import RoutingReason, RoutingStats
from engine.wire.messages import EngineUpdate
from engine.wire.parts.kv_fetching import KVHolder

MAX_LOST_HOLDS = 10_000
BROKEN_S = 30.0  # without any engine that holds a prompt, after which its hold is broken: a hold that moves takes less


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    engines: list[str]  #: all engines, best first; the request is placed on the first
    reason: RoutingReason
    cached_tokens: int  #: prompt tokens expected to be cached on the first engine
    holder: KVHolder | None  #: an engine that has more of the prompt cached, and from which the first may fetch it
    lost_hold: bool = False  #: whether a client held a part of the prompt on an engine that is gone


class Balancer:
    """One router's view of the engines of one pool.

    An engine that has just lost a request counts as unhealthy, and comes last until it reports again. Otherwise it
    would seem idle and attract all requests. An engine that is about to stop stays unhealthy.
    """

    def __init__(self, config: RoutingConfig, role: Role, block_size: int, rng: RandomNumbers):
        self.placements = Placements()
        self.stats = RoutingStats(config.policy)
        self._cost = RoutingCost(
            block_size, config.prefix_weight, config.running_weight_of(role), config.adapter_weight
        )
        self._rng, self._observer = rng, ChoiceObserver()
        self._ranker = Ranker(make_policy(config.policy, self._cost, self, self._order), self._cost, self._order)
        self._role, self._policy_name = role, config.policy
        #: Roles of the engines whose roles can change.
        self.roles: dict[str, Role] = {}
        self._unhealthy: set[str] = set()
        self._lost_holds: dict[int, None] = {}  # keys of the last blocks of holds whose engines are gone, oldest first
        self._uncounted: dict[int, float] = {}  # those of them that may still move, with the time of their loss

    def choose(self, prompt: PromptDigest, engines: Sequence[str]) -> RoutingDecision:
        """Place a prompt on one of the engines; there must be at least one.

        A second call for the same request moves it, because the first engine did not take it.
        """
        moved = self.placements.end(prompt.request_id, confirmed=False)
        lookup = self._make_lookup(prompt)
        unhealthy = self._unhealthy.intersection(engines)
        healthy = [engine for engine in engines if engine not in unhealthy] if unhealthy else engines
        candidates, home = healthy or engines, self._home(prompt, healthy or engines)
        watched = self._observer.begin(lookup, self._ranker.policy.memory)
        ranked, reason = self._ranker.rank(prompt, candidates, home, watched)
        able = ranked
        if healthy:
            ranked = able + [engine for engine in engines if engine in unhealthy]
        best = watched(ranked[0])
        placement = Placement(
            engine=best.engine,
            tokens=self._cost.uncached_tokens(prompt, best),
            blocks=self._cost.new_blocks(prompt, best),
            keys=prompt.keys[best.cached :],
            cached_tokens=self._cost.cached_tokens(prompt, best),
            embeds=self._cost.uncached_embeds(prompt, best),
            adapter=prompt.adapter,
        )
        self.placements.place(prompt.request_id, placement)
        if not moved:
            self.stats.routed[reason] += 1
            if prompt.adapter:
                self.stats.adapters["held" if best.holds_adapter else "to_load"] += 1
        holder = self._holder(prompt, best)
        choice = Choice(
            prompt=prompt,
            engines=candidates,
            unhealthy=sorted(unhealthy),
            home=home,
            ranked=able,
            reason=reason,
            cached_tokens=placement.cached_tokens,
            holder="" if holder is None else holder.engine.engine_id,
            moves=moved,
        )
        self._observer.chosen(choice)
        return RoutingDecision(ranked, reason, placement.cached_tokens, holder, self._lost_hold(prompt))

    def randrange(self, start: int, stop: int | None = None) -> int:
        """Draw a random number for the policy."""
        number = self._rng.randrange(start, stop)
        self._observer.drawn(number)
        return number

    def _order(self, key: str, engines: Iterable[str]) -> list[str]:
        found = rendezvous_order(key, engines)
        self._observer.ordered(found)
        return found

    def _holder(self, prompt: PromptDigest, chosen: EngineCandidate) -> KVHolder | None:
        """Return the engine with the longest prefix of a prompt, from which the chosen engine can fetch it; None if the
        chosen one's prefix is as long. Engines without free capacity are considered too."""
        if self.placements.engine(chosen.engine).peer is None:
            return None
        holder, most = None, chosen.cached
        for engine, record in self.placements.records.items():
            if record.peer is not None and engine not in self._unhealthy:
                stored = record.prefixes.match_stored(prompt.keys)
                if stored > most:
                    holder, most = record.peer, stored
        tokens = min(most * self._cost.block_size, prompt.num_tokens - 1)
        return None if holder is None else KVHolder(holder, tokens)

    def use_stats(self, stats: RoutingStats) -> None:
        """Count in `stats` from now on; keep the policy's name."""
        if stats is not self.stats:
            stats.policy, self.stats = self.stats.policy, stats

    def use_observer(self, observer: ChoiceObserver) -> None:
        """Tell `observer` of choices from now on."""
        if observer is not self._observer:
            self._observer = observer
            observer.watch(self._role, self._policy_name, self._cost)

    def update(self, update: EngineUpdate) -> bool:
        """Apply an engine's report. Returns False if an earlier report is missing, so that a snapshot is needed."""
        if update.draining:
            self._unhealthy.add(update.engine_id)
        else:
            self._unhealthy.discard(update.engine_id)
        if update.role is not None:
            self.roles[update.engine_id] = update.role
        self.placements.report(update.engine_id, update.load, update.admitted)
        for request_id, cached_tokens in update.prefilled:
            placement = self.placements.resolve(request_id)
            if placement is not None and cached_tokens >= 0:
                self.stats.record_estimate(placement.cached_tokens, cached_tokens)
        return self.placements.update_blocks(update)

    def end(self, request_id: str, *, confirmed: bool) -> None:
        """Record that the request's call has ended. confirmed: whether its engine had the request, and will report the
        prompt's outcome."""
        self.placements.end(request_id, confirmed=confirmed)

    def mark_unhealthy(self, engine: str) -> None:
        self._unhealthy.add(engine)

    def keep(self, engines: Iterable[str], now: float) -> None:
        """Forget all engines but these. now: on a clock that never goes back."""
        gone = (self.placements.records.keys() | self._unhealthy).difference(engines)
        self._unhealthy -= gone
        self.roles = {engine: role for engine, role in self.roles.items() if engine not in gone}
        for engine in gone:
            held = self.placements.engine(engine).held
            self._lost_holds.update(dict.fromkeys(held))
            self._uncounted.update(dict.fromkeys(held, now))
            self.placements.forget(engine)
        for key in list(self._lost_holds)[:-MAX_LOST_HOLDS]:
            del self._lost_holds[key]

    def count_broken_holds(self, now: float) -> None:
        """Count the holds whose engines have been gone for BROKEN_S, unless another engine has them by now."""
        due = [key for key, lost_at in self._uncounted.items() if now >= lost_at + BROKEN_S]
        held = self._held() if due else frozenset()
        for key in due:
            del self._uncounted[key]
            self.stats.holds_broken += key not in held

    def _held(self) -> frozenset[int]:
        """Return the keys of the last blocks of all holds."""
        return frozenset().union(*(record.held for record in self.placements.records.values()))

    def _make_lookup(self, prompt: PromptDigest) -> Lookup:
        records, cached = self.placements.records, 0

        @cache
        def lookup(engine: str) -> EngineCandidate:
            nonlocal cached
            record = records.get(engine, UNKNOWN)
            cached = record.prefixes.match(prompt.keys, guess=cached)
            return EngineCandidate(engine, record.load, cached, record.holds(prompt.adapter))

        return lookup

    def _home(self, prompt: PromptDigest, engines: Sequence[str]) -> str | None:
        """Return the engine that holds the longest part of the prompt, for whichever client."""
        holding = [(e, held) for e in engines if (held := self.placements.engine(e).held)]
        if holding:
            for key in reversed(prompt.keys):
                for engine, held in holding:
                    if key in held:
                        return engine
        return None

    def _lost_hold(self, prompt: PromptDigest) -> bool:
        """Return whether a part of the prompt was held on an engine that is gone, and no engine holds a longer part
        now. True only once for each hold."""
        lost = {key for key in prompt.keys if key in self._lost_holds} if self._lost_holds else set()
        if not lost:
            return False
        held = self._held()
        for key in lost:
            del self._lost_holds[key]
            if self._uncounted.pop(key, None) is not None:
                self.stats.holds_broken += key not in held
        return next(key not in held for key in reversed(prompt.keys) if key in lost or key in held)
