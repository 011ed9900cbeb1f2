"""Tokens that have come for a client that is behind in taking them."""

from __future__ import annotations

import msgspec

from deployments.frontend.token_channel import Inbox
from engine.wire.messages import TokenDelta

MANY = 32  # deltas; below, each is sent as it came


def take_backlog(first: TokenDelta | None, inbox: Inbox) -> list[TokenDelta | None]:
    """`first`, which was taken out of `inbox`; and where many more wait there, all of them, with those that follow each
    other in one sequence made one. So a slow client gets fewer and larger chunks, and no older state than it could.

    None, which wakes the reader, comes last. An end with an error stays by itself.
    """
    if inbox.qsize() < MANY:
        return [first]
    waiting = [first, *(inbox.get_nowait() for _ in range(inbox.qsize()))]
    merged: list[TokenDelta] = []
    newest: dict[str, int] = {}  # where in `merged`
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
    """Not if an error ends it, or if one between them is missing, which has to show."""
    next_position = first.position + len(first.token_ids)
    return later.finish_reason not in ("error", "abort") and later.position == next_position


def _join(first: TokenDelta, later: TokenDelta) -> TokenDelta:
    """What only a sequence's first delta tells is in `first`, what only its last tells in `later`."""
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
