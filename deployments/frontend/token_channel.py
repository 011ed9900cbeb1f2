"""The ZMQ socket at which the tokens of all engines arrive in an ingress, and the inboxes they are sorted into."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from deployments.observability.stats import IngressStats
from engine.distributed.cluster_key import ClusterKey
from engine.distributed.sockets import PullSocket, PushSockets
from engine.wire.messages import Abort, TokenBatch, TokenDelta

logger = logging.getLogger(__name__)

MAX_UNMERGED = 32
"""Deltas are merged only when more than this many are waiting; otherwise each is read as it came."""


class Inbox(asyncio.Queue[TokenDelta | None]):
    """Filled by the token channel, read by one Generation. None never comes from an engine: it wakes the reader."""

    def wake(self) -> None:
        self.put_nowait(None)

    async def take(self) -> list[TokenDelta | None]:
        """Wait for a delta and return it; if many wait, return all, with those of a sequence merged into one.

        So a client that is slow to read gets fewer and larger chunks, and is never further behind than it has to be.
        None comes last. A delta that reports an error is not merged.
        """
        first = await self.get()
        if self.qsize() < MAX_UNMERGED:
            return [first]
        waiting = [first, *(self.get_nowait() for _ in range(self.qsize()))]
        merged: list[TokenDelta] = []
        newest: dict[str, int] = {}  # index in `merged`, by request id
        for delta in waiting:
            if delta is None:
                continue
            at = newest.get(delta.request_id)
            if at is None or not _follows(delta, merged[at]):
                newest[delta.request_id] = len(merged)
                merged.append(delta)
            else:
                merged[at] = joined(merged[at], delta)
        return [*merged, None] if None in waiting else [*merged]


class TokenChannel:
    """Sorts the deltas of all engines into the inboxes of the requests they belong to."""

    def __init__(self, host: str, stats: IngressStats, key: ClusterKey | None = None):
        """host: address of this machine that engines reach. key: that all engines have."""
        self._stats = stats
        self._inboxes: dict[str, Inbox] = {}
        self._working: dict[str, tuple[str, str]] = {}  # by request id: the engine's id and address
        self._context = zmq.asyncio.Context()
        self._batches: PullSocket[TokenBatch] = PullSocket(self._context, host, TokenBatch, name="tokens", key=key)
        self._engines = PushSockets(zmq.Context(self._context), key=key)
        self.address = self._batches.address  #: for `GenerateRequest.reply_to`

    def open(self, request_ids: Iterable[str]) -> Inbox:
        """Return one inbox for all these requests."""
        inbox = Inbox()
        for request_id in request_ids:
            assert request_id not in self._inboxes, request_id
            self._inboxes[request_id] = inbox
        return inbox

    def close(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._inboxes.pop(request_id, None)
            self._working.pop(request_id, None)

    def move(self, old: str, new: str) -> None:
        """Give the request another id, for another engine. What still comes for the old one is dropped."""
        self._inboxes[new] = self._inboxes.pop(old)
        self._working.pop(old, None)

    def abort(self, request_id: str, reason: Literal["abort", "stop"] = "abort") -> None:
        """End the request in the engine that works for it, if it is known: once a delta has come."""
        if request_id in self._working:
            _, address = self._working[request_id]
            self._engines.forget_unused()
            self._engines.send(address, msgspec.msgpack.encode(Abort(request_id, reason)))

    def engine_of(self, request_id: str) -> str:
        """Return the id of the engine that works for a request, which must have had a delta."""
        return self._working[request_id][0]

    async def run(self) -> None:
        """Dispatch until cancelled, then close the socket."""
        try:
            await self._batches.serve(self._dispatch)
        finally:
            self._engines.close()  # its sockets are of a shadow context, which `destroy` does not know
            self._context.destroy(linger=0)

    def _dispatch(self, batch: TokenBatch) -> None:
        engine = (batch.engine_id, batch.commands_to)
        for delta in batch.deltas:
            inbox = self._inboxes.get(delta.request_id)
            if inbox is None:
                self._stats.dropped_deltas += 1  # some are normal after a client has left
            else:
                self._working[delta.request_id] = engine
                inbox.put_nowait(delta)


def _follows(later: TokenDelta, first: TokenDelta) -> bool:
    """Return whether the two can be merged: not if `later` reports an error, or if a delta between them is missing."""
    next_position = first.position + len(first.token_ids)
    return later.finish_reason not in ("error", "abort") and later.position == next_position


def sum_predictions(deltas: Iterable[TokenDelta]) -> tuple[int, int] | None:
    """Return the `prediction_tokens` of all the deltas together."""
    counts = [delta.prediction_tokens for delta in deltas if delta.prediction_tokens is not None]
    return (sum(accepted for accepted, _ in counts), sum(rejected for _, rejected in counts)) if counts else None


def joined(first: TokenDelta, later: TokenDelta) -> TokenDelta:
    """Merge two deltas. Fields of a sequence's first delta come from `first`, those of its last from `later`."""
    logprobs = None if later.logprobs is None else [*(first.logprobs or []), *later.logprobs]
    return msgspec.structs.replace(
        first,
        token_ids=first.token_ids + later.token_ids,
        logprobs=logprobs if later.token_ids else first.logprobs,
        finish_reason=later.finish_reason,
        stop_reason=later.stop_reason,
        text_complete=later.text_complete,
        prediction_tokens=sum_predictions([first, later]),
        times=later.times or first.times,
        num_preemptions=later.num_preemptions or first.num_preemptions,
        timeline=first.timeline + later.timeline,
    )
