"""Inboxes into which the tokens of all engines are sorted. Uses no sockets itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from deployments.observability.stats import IngressStats
from engine.wire.messages import Abort
from engine.wire.token_delta import TokenBatch, TokenDelta

MAX_UNMERGED = 32
"""Deltas are merged only when more than this many are waiting."""
LAST_DELTA_S = 10.0
"""Seconds for which an engine may take to end a request that was aborted."""
CLOSE_S = 1.0  # to wait for them when the ingress ends
TakeLast = Callable[[TokenDelta | None], None]


class Inbox:
    """Deltas for one Generation, filled by the token channel. A None among them is not from an engine: it only wakes
    the reader."""

    def __init__(self) -> None:
        self.last: dict[str, TokenDelta] = {}
        """Final deltas that have arrived, read or not, by request id."""
        self._waiting: list[TokenDelta | None] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, delta: TokenDelta | None) -> None:
        self._waiting.append(delta)
        if delta is not None and delta.finish_reason is not None:
            self.last[delta.request_id] = delta
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def wake(self) -> None:
        self.put(None)

    async def take(self) -> list[TokenDelta | None]:
        """Wait for a delta, and return all that have arrived, None last. If there are many, the deltas of each sequence
        are merged into one.

        So a slow client gets fewer and larger chunks, and falls no further behind than necessary. A delta that reports
        an error is not merged.
        """
        if not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        waiting, self._waiting = self._waiting, []
        if len(waiting) <= MAX_UNMERGED:
            return waiting if None not in waiting else [*(delta for delta in waiting if delta is not None), None]
        groups: list[list[TokenDelta]] = []
        newest: dict[str, list[TokenDelta]] = {}  # by request id
        for delta in waiting:
            if delta is None:
                continue
            group = newest.get(delta.request_id)
            if group is None or not _follows(delta, group[-1]):
                group = newest[delta.request_id] = []
                groups.append(group)
            group.append(delta)
        merged = [joined(group) for group in groups]
        return [*merged, None] if None in waiting else [*merged]


class Worker(NamedTuple):
    """The engine that works on a request, as in its TokenBatch."""

    engine_id: str
    commands_to: str
    numerics: str


class Inboxes:
    """Sorts the deltas of all engines into the inboxes of their requests."""

    address: str  #: value for `GenerateRequest.reply_to`

    def __init__(self, stats: IngressStats):
        self._stats = stats
        self._inboxes: dict[str, Inbox] = {}
        self._working: dict[str, Worker] = {}  # by request id
        self._aborted: dict[str, tuple[TakeLast, asyncio.TimerHandle]] = {}  # by request id
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    def send(self, address: str, message: bytes) -> None:
        raise NotImplementedError

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
        """Give a request another id, for another engine. Later deltas for the old id are dropped."""
        self._inboxes[new] = self._inboxes.pop(old)
        self._working.pop(old, None)

    def abort(self, request_id: str, reason: Literal["abort", "stop"] = "abort") -> None:
        """End the request in its engine. Has no effect before the first delta, which makes the engine known."""
        if request_id in self._working:
            address = self._working[request_id].commands_to
            self.send(address, msgspec.msgpack.encode(Abort(request_id, reason)))

    def take_last(self, request_id: str, take: TakeLast) -> None:
        """Call `take` with the final delta of a request that is being aborted, even after its inbox was closed, or with
        None if the delta does not come within LAST_DELTA_S."""
        timer = asyncio.get_running_loop().call_later(LAST_DELTA_S, self._end, request_id)
        self._aborted[request_id] = take, timer
        self._all_ended.clear()

    async def all_ended(self) -> None:
        """Wait for the final deltas of all aborted requests, for at most CLOSE_S. The others no longer count."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._all_ended.wait()
        except TimeoutError:
            for request_id in list(self._aborted):
                self._end(request_id)

    def _end(self, request_id: str, last: TokenDelta | None = None) -> None:
        take, timer = self._aborted.pop(request_id)
        timer.cancel()
        if not self._aborted:
            self._all_ended.set()
        take(last)

    def knows(self, request_id: str) -> bool:
        """Return whether a delta of the request has arrived, so that its engine is known."""
        return request_id in self._working

    def engine_of(self, request_id: str) -> str:
        """Return the id of the engine that works on a request. A delta of the request must have arrived."""
        return self._working[request_id].engine_id

    def numerics_of(self, request_id: str) -> str:
        """Return the digest of what that engine computes with; empty if it is of a version that does not tell."""
        return self._working[request_id].numerics

    def dispatch(self, batch: TokenBatch) -> None:
        """Put the deltas of a step into their inboxes. Those of requests that have left are dropped."""
        engine = Worker(batch.engine_id, batch.commands_to, batch.numerics)
        for delta in batch.deltas:
            inbox = self._inboxes.get(delta.request_id)
            is_last = bool(self._aborted) and delta.finish_reason is not None and delta.request_id in self._aborted
            if inbox is None:
                self._stats.dropped_deltas += 1  # some are normal after a client has left
            elif not is_last:
                self._working[delta.request_id] = engine
                inbox.put(delta)
            if is_last:
                self._end(delta.request_id, delta)


def _follows(later: TokenDelta, before: TokenDelta) -> bool:
    """Return whether two deltas can be merged: not if `later` reports an error, or if a delta between them is
    missing."""
    next_position = before.position + len(before.token_ids)
    return later.finish_reason not in ("error", "abort") and later.position == next_position


def joined(parts: Sequence[TokenDelta]) -> TokenDelta:
    """Return consecutive deltas of a sequence, merged into one."""
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return first
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return msgspec.structs.replace(
        first,
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        logprobs=[entry for entries in logprobs for entry in entries] if logprobs else None,
        prompt_logprobs=next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None),
        num_cached_tokens=sum(part.num_cached_tokens for part in parts),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        text_complete=last.text_complete,
        times=next((part.times for part in reversed(parts) if part.times is not None), None),
        num_preemptions=max(part.num_preemptions for part in parts),
        timeline=[event for part in parts for event in part.timeline],
        parts=[record for part in parts for record in part.parts],
    )
