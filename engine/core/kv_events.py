"""What an engine tells the routers that subscribe to it: its load, and which KV blocks it has. Knows no socket."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from engine.core.scheduler import Event, Scheduler
from engine.wire.messages import SUBSCRIPTION_S, EngineLoad, EngineUpdate, Subscribe

logger = logging.getLogger(__name__)

UPDATE_PERIOD_S = 0.1  # between two messages, while there is something to say
HEARTBEAT_S = 1.0  # and where there is not


@dataclass(slots=True)
class _Subscriber:
    until: float
    synced: bool = False  # it has had a snapshot


class KVEventPublisher:
    """Everybody gets the same messages, after a snapshot of their own. Without subscribers, nothing is recorded."""

    def __init__(self, engine_id: str, scheduler: Scheduler):
        self._engine_id, self._scheduler, self._pool = engine_id, scheduler, scheduler.pool
        self._subscribers: dict[str, _Subscriber] = {}  # by address
        self._number = 0
        self._sent_at = self._due_at = float("-inf")
        self._load = EngineLoad()  # as it was sent last
        self._admitted: list[str] = []
        self._prefilled: list[tuple[str, int]] = []
        self._prefilling: set[str] = set()

    def subscribe(self, command: Subscribe, now: float) -> None:
        if not self._subscribers:
            self._pool.track(True)
            self._prefilling = set(self._scheduler.queue.live)
        subscriber = self._subscribers.get(command.address)
        if subscriber is None:
            logger.info("new subscriber address=%s", command.address)
        synced = subscriber is not None and subscriber.synced and not command.resync
        self._subscribers[command.address] = _Subscriber(now + SUBSCRIPTION_S, synced)

    def admitted(self, request_id: str) -> None:
        """A request or a prefill request has come; it may be refused yet."""
        if self._subscribers:
            self._admitted.append(request_id)
            self._prefilling.add(request_id)

    def prefilled(self, event: Event) -> None:
        """If it is the first of its request, its prompt is computed."""
        if self._prefilling and event.delta.times is not None:
            self._resolve(event.request.request_id, event.request.num_cached)

    def finished(self, request_id: str) -> None:
        self._resolve(request_id, -1)

    def messages(self, now: float) -> Iterator[tuple[EngineUpdate, list[str]]]:
        """What is to be sent now, and the addresses that it goes to."""
        if not self._subscribers:
            return
        for address in [a for a, subscriber in self._subscribers.items() if subscriber.until < now]:
            del self._subscribers[address]
        if not self._subscribers:
            self._pool.track(False)
            self._admitted, self._prefilled, self._prefilling = [], [], set()
            return
        new = [address for address, subscriber in self._subscribers.items() if not subscriber.synced]
        self._due_at = self._sent_at + UPDATE_PERIOD_S
        if now < self._due_at and not new:
            return  # before anything is counted: this is called in every step
        load = self._scheduler.load()
        if not self._has_changed(load):
            self._due_at = self._sent_at + HEARTBEAT_S
        synced = [address for address, subscriber in self._subscribers.items() if subscriber.synced]
        if synced and now >= self._due_at:
            yield self._changes(load), synced
            self._sent_at, self._due_at, self._load = now, now + UPDATE_PERIOD_S, load
        if new:
            yield self._snapshot(load), new
            for address in new:
                self._subscribers[address].synced = True

    def wait_s(self, now: float) -> float | None:
        """Until something is to be sent, if nothing else happens. None if nobody follows."""
        return max(0.0, self._due_at - now) if self._subscribers else None

    def _has_changed(self, load: EngineLoad) -> bool:
        return bool(self._pool.has_changes or self._admitted or self._prefilled) or load != self._load

    def _changes(self, load: EngineLoad) -> EngineUpdate:
        self._number += 1
        stored, removed = self._pool.take_changes()
        admitted, self._admitted = self._admitted, []
        prefilled, self._prefilled = self._prefilled, []
        return self._update(load, False, stored, removed, admitted, prefilled)

    def _snapshot(self, load: EngineLoad) -> EngineUpdate:
        """As of now. What has changed since the message of this number comes with the next one again, harmlessly."""
        return self._update(load, True, self._pool.block_hashes(), [], list(self._scheduler.queue.live), [])

    def _update(
        self,
        load: EngineLoad,
        snapshot: bool,
        stored: list[bytes],
        removed: list[bytes],
        admitted: list[str],
        prefilled: list[tuple[str, int]],
    ) -> EngineUpdate:
        return EngineUpdate(
            engine_id=self._engine_id,
            number=self._number,
            snapshot=snapshot,
            load=load,
            stored=b"".join(stored),
            removed=b"".join(removed),
            admitted=admitted,
            prefilled=prefilled,
        )

    def _resolve(self, request_id: str, cached: int) -> None:
        if request_id in self._prefilling:
            self._prefilling.remove(request_id)
            self._prefilled.append((request_id, cached))
