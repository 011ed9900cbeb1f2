"""Decides which requests get blocks when blocks run out."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engine.core.door.part import Parts
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request, State
from engine.core.request_queue import RequestQueue
from engine.core.stats import SchedulerStats

logger = logging.getLogger(__name__)


class BlockAllocator:
    """Gives requests their blocks. When blocks run out, it preempts other requests, but only those later in the
    order."""

    def __init__(self, kv_cache: KVCacheManager, queue: RequestQueue, parts: Parts, totals: SchedulerStats):
        self._kv_cache, self._queue, self._parts, self._totals = kv_cache, queue, parts, totals

    @property
    def watermark(self) -> int:
        """Number of blocks to keep available, one for each request that will grow. Starting another request only to
        preempt it soon would waste work."""
        growing = sum(not r.asked_by for r in self._queue.running)
        return growing + len(self._queue.waiting_with_kv) + len(self._parts.kept(State.WAITING_FOR_REMOTE_KV))

    def reserve(self, request: Request, matched: int, start: int, tokens: int) -> bool:
        """Give a waiting request its blocks, with the arguments of KVCacheManager.reserve. If there are too few, takes
        blocks from later requests that have blocks but no slot yet. Returns False, and reserves nothing, if there are
        still too few."""
        while True:
            with_kv = self._queue.waiting_with_kv
            if self._kv_cache.reserve(request, matched, start, tokens, self.watermark):
                return True
            if not with_kv or with_kv[-1].order < request.order:
                return False
            self._preempt(with_kv[-1])

    def grow(self, request: Request, tokens: int, planned: Sequence[Request] = ()) -> bool:
        """Give a running request blocks for `tokens` tokens in all. Returns False if the request itself was preempted,
        or has to wait because another engine is reading its blocks, or because the later ones are in `planned`: the
        step that is being planned computes them."""
        while not self._kv_cache.grow(request, tokens):
            victim = self._victim(request, planned)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _victim(self, request: Request, planned: Sequence[Request]) -> Request | None:
        """Return the request to preempt among those later than `request`, or `request` itself if there is none.

        Requests that only wait for a slot come first, then those with the fewest unshared blocks, then the newest. A
        prompt computed for another engine is never chosen, since that engine reads its blocks: then None is returned.
        """
        unshared, waiting = self._kv_cache.num_unshared, State.WAITING
        later = [r for r in [*self._queue.running, *self._queue.waiting_with_kv] if r.order > request.order]
        if planned and later:
            later = [r for r in later if r not in planned]
            if not any(map(unshared, later)):
                return None
        victims = [r for r in [*filter(unshared, later), request] if not r.asked_by]
        return max(victims, key=lambda r: (r is not request, r.state is waiting, -unshared(r), r.order), default=None)

    def _preempt(self, request: Request) -> None:
        unshared = self._kv_cache.num_unshared(request)
        logger.info("preempted request_id=%s computed_tokens=%d unshared_blocks=%d times=%d",
                    request.request_id, request.computed, unshared, request.num_preemptions + 1)  # fmt: skip
        request.note(f"preempted because blocks ran out; the KV of {request.computed} tokens is dropped")
        self._queue.remove(request)
        self._kv_cache.release(request, finite=False)
        self._queue.wait(request)
        request.num_preemptions += 1
        self._totals.preemptions += 1
