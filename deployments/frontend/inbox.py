"""The deltas that have come for one HTTP request and have not been read."""

from __future__ import annotations

import asyncio

import msgspec

from engine.wire.messages import TokenDelta

MAX_UNMERGED = 32
"""With fewer deltas waiting, each is read as it came."""


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
                merged[at] = _join(merged[at], delta)
        return [*merged, None] if None in waiting else [*merged]


def _follows(later: TokenDelta, first: TokenDelta) -> bool:
    """Return whether the two can be merged: not if `later` reports an error, or if a delta between them is missing."""
    next_position = first.position + len(first.token_ids)
    return later.finish_reason not in ("error", "abort") and later.position == next_position


def _join(first: TokenDelta, later: TokenDelta) -> TokenDelta:
    """Merge two deltas. Fields of a sequence's first delta come from `first`, those of its last from `later`."""
    logprobs = None if later.logprobs is None else [*(first.logprobs or []), *later.logprobs]
    return msgspec.structs.replace(
        first,
        token_ids=first.token_ids + later.token_ids,
        logprobs=logprobs if later.token_ids else first.logprobs,
        finish_reason=later.finish_reason,
        stop_reason=later.stop_reason,
        text_complete=later.text_complete,
        times=later.times or first.times,
        num_preemptions=later.num_preemptions or first.num_preemptions,
        timeline=first.timeline + later.timeline,
    )
