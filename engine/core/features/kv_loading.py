"""Waiting requests whose KV is on its way into the prefix cache. Pure Python."""

from __future__ import annotations

from engine.core.features.kv_fetching import KVFetching, NoFetching
from engine.core.features.kv_offloading import KVOffloading, NoOffloading
from engine.core.kv_cache_manager import Shorten
from engine.core.request import Request


class KVLoading:
    """Asks the tiers below the cache, and then other engines, for KV of a waiting request. Meanwhile the request is in
    the state LOADING_KV: it is not in the queue, and holds no blocks."""

    def __init__(self, offloading: KVOffloading | NoOffloading, fetching: KVFetching | NoFetching):
        self._offloading, self._fetching = offloading, fetching

    @property
    def requests(self) -> list[Request]:
        """Live requests that wait for KV."""
        return [*self._offloading.loading, *self._fetching.waiting]

    def load(self, request: Request, matched: int, shorten: Shorten, watermark: int, now: float) -> bool:
        """Return whether a request has to wait for KV from a tier or another engine, with the arguments of
        KVOffloading.load."""
        wanted = (request, matched, shorten, watermark, now)
        return self._offloading.load(*wanted) or self._fetching.fetch(*wanted)

    def clear(self) -> None:
        """Empty the tiers, and keep nothing of what is coming."""
        self._offloading.clear()
        self._fetching.clear()
