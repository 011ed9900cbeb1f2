"""Publishes an engine's load and KV blocks to the routers that subscribe. Uses no sockets itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from engine.core.engine_stats import load_of
from engine.core.output import Event
from engine.core.scheduler import Scheduler
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.kept_prefixes import KeepsPrefixes
from engine.parts.kv_fetching.kv_fetching import KVFetching
from engine.parts.kv_groups.windowed_kv_cache import window_blocks
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.parts.kv_tiers.tier import NoHashes
from engine.serving.hash_changes import HashChanges
from engine.wire.messages import SUBSCRIPTION_S, EngineUpdate, Subscribe
from engine.wire.stats.engine_stats import EngineLoad
from engine.wire.stats.handoff_stats import Role

logger = logging.getLogger(__name__)

UPDATE_PERIOD_S = 0.1  # between two updates while something changes
HEARTBEAT_S = 1.0  # between two updates while nothing changes


@dataclass(slots=True)
class _Subscriber:
    until: float
    synced: bool = False  # has received a snapshot


class KVEventPublisher:
    """Publishes updates to subscribers: first a snapshot, then the changes, which are the same for all. Records nothing
    without subscribers. Blocks in a tier below the cache count as stored."""

    def __init__(self, engine_id: str, scheduler: Scheduler):
        #: Whether routers are told to prefer other engines.
        self.draining = False
        self._engine_id, self._scheduler, self._pool = engine_id, scheduler, scheduler.kv_cache.pool
        self._blocks = HashChanges()
        tiers = scheduler.parts.get(KVOffloading)
        self._below = NoHashes() if tiers is None else tiers.hashes
        self._kept, fetching = scheduler.parts.get(KeepsPrefixes), scheduler.parts.get(KVFetching)
        self._peer = None if fetching is None else fetching.peer
        self._subscribers: dict[str, _Subscriber] = {}  # by address
        self._sent_at = self._due_at = float("-inf")
        self._number, self._load, self._held = 0, EngineLoad(), b""  # of the last update
        self._handoffs = scheduler.parts.get(Handoffs)
        self._role = self._own_role
        self._admitted: list[str] = []
        self._prefilled: list[tuple[str, int]] = []
        self._prefilling: set[str] = set()  # admitted, but not reported as prefilled yet

    @property
    def _own_role(self) -> Role | None:
        return None if self._handoffs is None else self._handoffs.role

    def subscribe(self, command: Subscribe, now: float) -> None:
        if not self._subscribers:
            self._pool.observers.append(self._blocks)
            self._below.track(True)
            self._prefilling = set(self._scheduler.queue.live)
        subscriber = self._subscribers.get(command.address)
        if subscriber is None:
            logger.info("new subscriber address=%s", command.address)
        synced = subscriber is not None and subscriber.synced and not command.resync
        self._subscribers[command.address] = _Subscriber(now + SUBSCRIPTION_S, synced)

    def admitted(self, request_id: str) -> None:
        """Record that a request or remote prefill has arrived. The engine can still refuse it."""
        if self._subscribers:
            self._admitted.append(request_id)
            self._prefilling.add(request_id)

    def prefilled(self, event: Event) -> None:
        """Record an event of a request. The first event with times means that the prompt is computed."""
        if self._prefilling and event.delta.times is not None:
            self._resolve(event.request.request_id, event.request.prefix.num_cached)

    def finished(self, request_id: str) -> None:
        self._resolve(request_id, -1)

    def messages(self, now: float) -> Iterator[tuple[EngineUpdate, list[str]]]:
        """Yield the updates that are due, each with the addresses that it goes to."""
        if not self._subscribers:
            return
        for address in [a for a, subscriber in self._subscribers.items() if subscriber.until < now]:
            del self._subscribers[address]
        if not self._subscribers:
            self._pool.observers.remove(self._blocks)
            self._blocks = HashChanges()
            self._below.track(False)
            self._admitted, self._prefilled, self._prefilling = [], [], set()
            return
        new = [address for address, subscriber in self._subscribers.items() if not subscriber.synced]
        self._due_at = self._sent_at + UPDATE_PERIOD_S
        if now < self._due_at and not new:
            return  # before computing the load: this is called in every step
        load = load_of(self._scheduler)
        held, role = b"" if self._kept is None else b"".join(self._kept.ends), self._own_role
        told = (load, held, role) == (self._load, self._held, self._role)
        changed = self.draining or self._blocks or not told
        if not (changed or self._admitted or self._prefilled):
            self._due_at = self._sent_at + HEARTBEAT_S
        synced = [address for address, subscriber in self._subscribers.items() if subscriber.synced]
        if synced and now >= self._due_at:
            yield self._changes(load, None if held == self._held else held), synced
            self._sent_at, self._due_at = now, now + (UPDATE_PERIOD_S if self.draining else HEARTBEAT_S)
            self._load, self._held, self._role = load, held, role
        if new:
            yield self._snapshot(load, held), new
            for address in new:
                self._subscribers[address].synced = True

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until the next update is due if nothing else happens; None without subscribers."""
        return max(0.0, self._due_at - now) if self._subscribers else None

    def _changes(self, load: EngineLoad, held: bytes | None) -> EngineUpdate:
        self._number += 1
        stored, evicted = self._blocks.take()
        removed = dict.fromkeys(self._below.gone(evicted))
        stored += [each for each in evicted if each not in removed]  # in a tier; perhaps new since the last update
        admitted, self._admitted = self._admitted, []
        prefilled, self._prefilled = self._prefilled, []
        return EngineUpdate(
            engine_id=self._engine_id,
            number=self._number,
            snapshot=False,
            load=load,
            stored=b"".join(stored),
            removed=b"".join(removed),
            admitted=admitted,
            prefilled=prefilled,
            held=held,
            draining=self.draining,
            role=self._own_role,
        )

    def _snapshot(self, load: EngineLoad, held: bytes) -> EngineUpdate:
        """Return the current state, with the number of the last update. The next update repeats the changes since that
        one, which does no harm."""
        live = self._scheduler.queue.live
        return EngineUpdate(
            engine_id=self._engine_id,
            number=self._number,
            snapshot=True,
            load=load,
            stored=b"".join([*self._pool.block_hashes(), *self._below.all()]),
            removed=b"",
            admitted=list(live),
            prefilled=[(name, r.prefix.num_cached) for name, r in live.items() if name not in self._prefilling],
            peer=self._peer,
            held=held,
            draining=self.draining,
            role=self._own_role,
            window_blocks=window_blocks(self._scheduler.kv_cache.groups[0]),
        )

    def _resolve(self, request_id: str, cached: int) -> None:
        if request_id in self._prefilling:
            self._prefilling.remove(request_id)
            self._prefilled.append((request_id, cached))
