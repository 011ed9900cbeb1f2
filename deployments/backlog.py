"""Tokens that have come for a client that is behind in taking them."""

from __future__ import annotations

import asyncio

import msgspec

from engine.messages import TokenDelta

MANY = 32  # deltas; below, each is sent as it came


def take_backlog(delta: TokenDelta, inbox: asyncio.Queue[TokenDelta | None]) -> list[TokenDelta | None]:
    """`delta`, which was taken out of `inbox`; and where many more wait there, all of them, with those that follow each
    other in one sequence made one. So a slow client gets fewer and larger chunks, and no older state than it could.

    None, which wakes the reader, comes last. An end with an error stays by itself.
    """
    if inbox.qsize() < MANY:
        return [delta]
    merged: list[TokenDelta | None] = [delta]
    newest = {delta.request_id: 0}  # where in `merged`
    wakes = False
    while not inbox.empty():
        later = inbox.get_nowait()
        if later is None:
            wakes = True
            continue
        at = newest.get(later.request_id)
        before = None if at is None else merged[at]
        if at is None or before is None or later.finish_reason in ("error", "abort"):
            newest[later.request_id] = len(merged)
            merged.append(later)
        else:
            merged[at] = _join(before, later)
    return [*merged, None] if wakes else merged


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
    )
