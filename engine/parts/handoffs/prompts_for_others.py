"""Requests whose KV this engine computes, or holds, for other engines. Pure Python."""

from __future__ import annotations

from collections import Counter

import msgspec

from engine.core.request import Request, State
from engine.core.request_queue import RequestQueue
from engine.costs.request_cost import cost_of
from engine.errors import InvalidParameter
from engine.parts.handoffs.handoff_requests import HandoffRequests, handed_over
from engine.wire.handoff import (
    Closed,
    FinishPrefill,
    FirstToken,
    HeldBlocks,
    HoldRequest,
    RefusePrefill,
    ReportProgress,
)
from engine.wire.remote_request import NOBODY, KVSource, RemoteRequest
from engine.wire.token_delta import FinishReason, TokenLogprob

STUCK_S = 5.0  # without progress of other engines' prompts, while this engine waits for prompts of its own
STUCK = "the prompt waits for blocks, while this engine waits for prompts of its own"


class PromptsForOthers:
    """Reports the progress of prompts to the engines that asked for them, and keeps what those engines read."""

    def __init__(self, requests: HandoffRequests, moves: Counter[str]):
        """moves: counts requests that moved from here by outcome: `released`, `cancelled` or `expired`."""
        self._requests, self._moves = requests, moves
        #: prompts computed for other engines, and requests that have stopped here, whose blocks others may still read;
        #: by handoff id
        self.leased: dict[str, Request] = {}
        self._next: tuple[Request | None, float] = None, 0.0  # the next prompt, and since when it is that

    def check(self, remote_request: RemoteRequest) -> None:
        """Raise RequestError if the engine that sent this request could not use KV computed here."""
        own = self._requests.fingerprint
        if remote_request.fingerprint != own:
            raise InvalidParameter("fingerprint", remote_request.fingerprint, f"that of this engine ({own})")
        if remote_request.decode == self._requests.peer:  # routers may know its role a moment later than itself
            raise InvalidParameter("decode", remote_request.decode.engine_id, "another engine")

    def report(self, request: Request, computed: int, block_size: int) -> None:
        """Report that the KV of `computed` tokens is complete. Their full blocks must already be cached.

        A partly filled block is reported only at the end of the prompt. Before that, the prefix cache may replace it by
        another block of the same content.
        """
        asked_by, whole = request.asked_by, computed == len(request.tokens)
        assert asked_by is not None
        upto = computed if whole else computed // block_size * block_size
        if upto <= asked_by.skip or not (whole or request.tables[0].keeps_all):
            return
        groups = handed_over(request, asked_by.skip, block_size)
        blocks = [block for group in groups for block in group] if whole else groups[0]
        upto_blocks = None if whole else (upto - asked_by.skip) // block_size
        told = cost_of(request).told()
        self._requests.send(ReportProgress(asked_by.handoff_id, upto, blocks[:upto_blocks], *told))

    def finish(self, request: Request, token: int, logprob: TokenLogprob | None, block_size: int) -> None:
        """Report the first token, once the whole prompt is computed."""
        assert request.asked_by is not None
        request.note("first token computed")
        first = self._first(request, token, logprob, block_size)
        self._requests.send(FinishPrefill(request.asked_by.handoff_id, first))

    def _first(self, request: Request, token: int, logprob: TokenLogprob | None, block_size: int) -> FirstToken:
        peer = self._requests.peer
        engine_id = "" if peer is None else peer.engine_id
        timeline = [msgspec.structs.replace(event, where=engine_id) for event in request.take_timeline()]
        last, cached, numerics = request.last_hash(block_size), request.prefix.num_cached, self._requests.numerics
        return FirstToken(token, logprob, last, cached, timeline, engine_id, numerics)

    def refuse(self, request: Request, reason: str) -> None:
        """Refuse a prompt to the engine that asked for it, even if a part is already computed."""
        assert request.asked_by is not None
        self._requests.send(RefusePrefill(request.asked_by, reason))

    def hold(
        self, request: Request, groups: list[HeldBlocks], token: int, logprob: TokenLogprob | None, block_size: int
    ) -> KVSource:
        """Hold the KV of a stopped request for the engine that will continue it. token: the request's next token."""
        assert self._requests.peer is not None
        request.asked_by = self._requests.prompt(request, self._requests.new_id(request), NOBODY)
        first = self._first(request, token, logprob, block_size)
        self._requests.send(HoldRequest(request.asked_by, groups, first))
        return KVSource(request.asked_by.handoff_id, self._requests.peer)

    def lease(self, request: Request, queue: RequestQueue) -> None:
        """Stop computing a request. Its blocks stay until the other engine has read them."""
        assert request.asked_by is not None
        queue.remove(request)
        request.state = State.LEASED
        self.leased[request.asked_by.handoff_id] = request

    def closed(self, request: Request, event: Closed) -> FinishReason:
        """Record that no other engine reads a request's blocks any more. Returns the request's finish reason."""
        assert request.asked_by is not None
        if request.asked_by.decode == NOBODY:
            self._moves[event.reason] += 1
            return "abort"  # it ends elsewhere
        cost_of(request).paid_ns = event.paid_ns
        return "length" if event.reason == "released" else "abort"

    def stuck(self, queue: RequestQueue, *, waits: bool, now: float) -> list[Request]:
        """Return the prompts of other engines that this engine must refuse: they have waited for STUCK_S, while this
        engine computed no prompt for others and its own requests waited for KV. To be called at least once a second.

        Engines that change roles at the same time could otherwise wait for each other: each would have given its blocks
        to requests whose prompts wait for blocks of the other engine.

        waits: whether requests of this engine wait for KV of others.
        """
        asked = [request for request in queue.waiting if request.asked_by and not request.tables]
        first = next(iter(asked), None)
        if first is not self._next[0] or not waits or any(r.asked_by for r in queue.running):
            self._next = first, now
        if now - self._next[1] < STUCK_S:
            return []
        return [request for request in asked if now - request.clock.arrived_at >= STUCK_S]
