"""Applies the progress of handoffs to the queue and the KV cache of a scheduler. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.features.handoffs import HandoffManager
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request, State
from engine.core.request_queue import RequestQueue
from engine.errors import ServingError
from engine.wire.handoff import BlocksAsked, Closed, Failed, FirstToken, HandoffEvent, Noted, Received, Spent
from engine.wire.token_delta import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Arrived:
    """The KV of all known tokens of a request has come from another engine, and so has the next token."""

    request: Request
    first: FirstToken


@dataclass(frozen=True, slots=True)
class Ended:
    """A request ends because its handoff has ended."""

    request: Request
    reason: FinishReason
    error: ServingError | None = None


class HandoffProgress:
    """Records the progress of handoffs: of prompts that other engines compute, and of requests whose blocks other
    engines read."""

    def __init__(self, handoffs: HandoffManager, queue: RequestQueue, kv_cache: KVCacheManager):
        self._handoffs, self._queue, self._kv_cache = handoffs, queue, kv_cache

    # -- events of the channel -----------------------------------------------------------------------------

    def handle(self, event: HandoffEvent, now: float) -> Arrived | Ended | None:
        """Record an event. Returns what the scheduler must record or end, if anything."""
        match event:
            case Spent(handoff_id, cost):
                if handoff_id in self._handoffs.receiving:
                    self._handoffs.receiving[handoff_id].cost.coming = cost
                return None
            case Noted():
                if noted := self._queue.live.get(event.request_id):
                    noted.timeline.append(event.what)
                return None
            case BlocksAsked():
                self._handoffs.refuse_blocks(event)
                return None
            case Closed():
                leased = self._handoffs.leased.get(event.handoff_id)
                request = leased or self._queue.live[event.handoff_id]  # one that is not leased is still being computed
                return Ended(request, self._handoffs.closed(request, event))
            case Received():
                return self._received(event, now)
            case Failed():
                return self._failed(event, now)

    def _received(self, event: Received, now: float) -> Arrived | None:
        request, first = self._handoffs.received(event, now), event.first
        verified = self._kv_cache.received(request)
        if not self._keep(request, verified):
            return None
        request.timeline += first.timeline
        request.cost.received(event.byte_ns)
        request.computed, request.in_flight = verified, 1
        request.prefix.num_cached = max(request.prefix.num_cached, first.cached)
        return Arrived(request, first)

    def _failed(self, event: Failed, now: float) -> Ended | None:
        request = self._handoffs.failed(event, now)
        if not self._keep(request, event.verified):
            return None
        request.cost.failed()
        self._kv_cache.invalidate(request, request.tables[0].num_cached)  # the other engine's logits may not be finite
        self._kv_cache.release(request)
        error = self._handoffs.final_error(request, event)
        return Ended(request, "error", error) if error else None

    def _keep(self, request: Request, verified: int) -> bool:
        """Cache the blocks that have arrived for a request, up to `verified` tokens, and queue the request. Returns
        False if the request has ended meanwhile; its blocks are then released."""
        self._kv_cache.cache_blocks(request, verified)
        if request.state is State.FINISHED:
            self._kv_cache.release(request)
            return False
        self._queue.wait(request)
        return True

    # -- requests whose blocks other engines read ----------------------------------------------------------

    def report(
        self,
        request: Request,
        computed: int,
        tokens: list[int],
        logprobs: list[TokenLogprob] | None,
        error: ServingError | None,
    ) -> None:
        """Report the computed tokens of a prompt to the engine that asked for it. `tokens` is empty until the whole
        prompt is computed; then it holds the first sampled token. error: why no token could be sampled."""
        size = self._kv_cache.pool.block_size
        self._handoffs.report(request, computed, size)
        if not tokens:
            return
        request.in_flight -= 1
        if error is not None:
            self._handoffs.refuse(request, str(error))
        else:
            request.note("first token computed")
            self._handoffs.finish(request, tokens[0], logprobs[0] if logprobs else None, size)
        self.lease(request)

    def cancel(self, request: Request, reason: str) -> None:
        """Refuse a prompt to the engine that asked for it, even if a part is already computed."""
        if request.state is not State.LEASED:
            self.lease(request)
        self._handoffs.refuse(request, reason)

    def lease(self, request: Request) -> None:
        """Stop computing a request. Its blocks stay until the other engine has read them."""
        assert request.asked_by is not None
        self._queue.remove(request)
        request.state = State.LEASED
        self._handoffs.leased[request.asked_by.handoff_id] = request
