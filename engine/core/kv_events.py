"""What an engine tells the routers that follow it: its load, and which KV blocks it has. Knows no socket."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from engine.core.scheduler import Event, Scheduler
from engine.wire.messages import SUBSCRIPTION_S, EngineLoad, EngineUpdate, Subscribe

logger = logging.getLogger(__name__)

PERIOD_S = 0.1  # between two messages, while there is something to say
HEARTBEAT_S = 1.0  # and where there is not


@dataclass(slots=True)
class _Follower:
    until: float
    synced: bool = False  # it has had a snapshot


class KVEventPublisher:
    """Everybody gets the same messages, after a snapshot of their own. Where nobody follows, nothing is recorded."""

    def __init__(self, engine_id: str, scheduler: Scheduler):
        self._engine_id, self._scheduler, self._pool = engine_id, scheduler, scheduler.pool
        self._followers: dict[str, _Follower] = {}  # by address
        self._number = 0
        self._sent_at = self._due_at = float("-inf")
        self._load = EngineLoad()  # as it was sent last
        self._taken: list[str] = []
        self._settled: list[tuple[str, int]] = []
        self._unsettled: set[str] = set()

    def follow(self, command: Subscribe, now: float) -> None:
        if not self._followers:
            self._pool.track(True)
            self._unsettled = set(self._scheduler.live_ids)
        follower = self._followers.get(command.address)
        if follower is None:
            logger.info("news go to %s", command.address)
        synced = follower is not None and follower.synced and not command.again
        self._followers[command.address] = _Follower(now + SUBSCRIPTION_S, synced)

    def took(self, request_id: str) -> None:
        """A request or a ticket has come; it may be refused yet."""
        if self._followers:
            self._taken.append(request_id)
            self._unsettled.add(request_id)

    def told(self, event: Event) -> None:
        """If it is the first of its request, its prompt is computed."""
        if self._unsettled and event.delta.times is not None:
            self._settle(event.request.request_id, event.request.num_cached)

    def ended(self, request_id: str) -> None:
        self._settle(request_id, -1)

    def messages(self, now: float) -> Iterator[tuple[EngineUpdate, list[str]]]:
        """What is to be sent now, and the addresses that it goes to."""
        if not self._followers:
            return
        for address in [a for a, follower in self._followers.items() if follower.until < now]:
            del self._followers[address]
        if not self._followers:
            self._pool.track(False)
            self._taken, self._settled, self._unsettled = [], [], set()
            return
        new = [address for address, follower in self._followers.items() if not follower.synced]
        self._due_at = self._sent_at + PERIOD_S
        if now < self._due_at and not new:
            return  # before anything is counted: this is called in every step
        load = self._scheduler.load()
        if not self._has_changed(load):
            self._due_at = self._sent_at + HEARTBEAT_S
        synced = [address for address, follower in self._followers.items() if follower.synced]
        if synced and now >= self._due_at:
            yield self._changes(load), synced
            self._sent_at, self._due_at, self._load = now, now + PERIOD_S, load
        if new:
            yield self._snapshot(load), new
            for address in new:
                self._followers[address].synced = True

    def wait_s(self, now: float) -> float | None:
        """Until something is to be sent, if nothing else happens. None if nobody follows."""
        return max(0.0, self._due_at - now) if self._followers else None

    def _has_changed(self, load: EngineLoad) -> bool:
        return bool(self._pool.has_changes or self._taken or self._settled) or load != self._load

    def _changes(self, load: EngineLoad) -> EngineUpdate:
        self._number += 1
        stored, removed = self._pool.take_changes()
        taken, self._taken = self._taken, []
        settled, self._settled = self._settled, []
        return self._news(load, False, stored, removed, taken, settled)

    def _snapshot(self, load: EngineLoad) -> EngineUpdate:
        """As of now. What has changed since the message of this number comes with the next one again, harmlessly."""
        return self._news(load, True, self._pool.names(), [], list(self._scheduler.live_ids), [])

    def _news(
        self,
        load: EngineLoad,
        snapshot: bool,
        stored: list[bytes],
        removed: list[bytes],
        taken: list[str],
        settled: list[tuple[str, int]],
    ) -> EngineUpdate:
        return EngineUpdate(
            engine_id=self._engine_id,
            number=self._number,
            snapshot=snapshot,
            load=load,
            stored=b"".join(stored),
            removed=b"".join(removed),
            taken=taken,
            settled=settled,
        )

    def _settle(self, request_id: str, cached: int) -> None:
        if request_id in self._unsettled:
            self._unsettled.remove(request_id)
            self._settled.append((request_id, cached))
