"""Waiting requests whose KV is on its way into the prefix cache. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.features.kv_fetching import KVFetching, NoFetching
from engine.core.features.kv_offloading import KVOffloading, NoOffloading
from engine.core.request import Request, State
from engine.core.request_queue import RequestQueue
from engine.wire.handoff import HandoffEvent
from engine.wire.kv_offload import StoreListing, TierAnswer


class KVLoading:
    """Requests whose KV comes into the prefix cache, from a tier or another engine. Meanwhile such a request is in the
    state LOADING_KV: it is not in the queue, and holds no blocks."""

    def __init__(self, queue: RequestQueue, offloading: KVOffloading | NoOffloading, fetching: KVFetching | NoFetching):
        self._queue, self._offloading, self._fetching = queue, offloading, fetching

    @property
    def requests(self) -> list[Request]:
        """Live requests that wait for KV."""
        return [*self._offloading.loading, *self._fetching.waiting]

    def begin(self, request: Request) -> None:
        """Take a request out of the queue, since its KV is on its way."""
        self._queue.remove(request)
        request.state = State.LOADING_KV

    def update(self, now: float) -> None:
        """Go on with what takes time. Requests that have waited long enough are queued again."""
        self._fetching.update(now)
        self._offloading.update(now)
        self._wait(self._offloading.take_loaded())

    def answered(self, answers: Iterable[TierAnswer | StoreListing], now: float) -> None:
        """Record answers of the tiers. Requests whose KV has arrived, or will not arrive, are queued again."""
        for answer in answers:
            self._offloading.answered(answer, now)
        self._wait(self._offloading.take_loaded())

    def owns(self, event: HandoffEvent) -> bool:
        """Return whether an event belongs to a fetch, so that `handle` takes it."""
        return self._fetching.owns(event)

    def handle(self, event: HandoffEvent, now: float) -> None:
        """Record the progress of a fetch. Requests whose KV has arrived, or will not arrive, are queued again."""
        self._wait(self._fetching.handle(event, now))

    def clear(self) -> None:
        """Empty the tiers, and discard the KV that is still to arrive."""
        self._offloading.clear()
        self._fetching.clear()

    def _wait(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._queue.wait(request)
