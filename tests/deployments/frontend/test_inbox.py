from __future__ import annotations

import asyncio

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.frontend.inbox import MAX_UNMERGED, Inbox
from engine.wire.messages import ErrorInfo, RequestTimes, TokenDelta, TokenLogprob
from engine.wire.timeline import TimelineEvent

ENDS = st.sampled_from(["stop", "length", "error", None])


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0, 1, [])


def sequence(name: str, count: int, end: str | None) -> list[TokenDelta]:
    """The deltas of one sequence of `count` tokens, as an engine sends them."""
    deltas = [
        TokenDelta(
            request_id=name,
            position=i,
            token_ids=[i],
            logprobs=[logprob(i)],
            num_cached_tokens=0 if i else 7,
            timeline=[TimelineEvent(float(i), "", "preempted")] if i % 10 == 0 else [],
        )
        for i in range(count)
    ]
    if end == "error":
        error = ErrorInfo("engine_unavailable", "gone", 503, True, "server_error")
        return [*deltas, TokenDelta(request_id=name, finish_reason="error", error=error)]
    if end is not None:
        times = RequestTimes(0.1, 0.2, 0.3)
        last = TokenDelta(request_id=name, position=count, token_ids=[count], logprobs=[logprob(count)], times=times)
        return [*deltas, msgspec.structs.replace(last, finish_reason=end)]
    return deltas


def taken(deltas: list[TokenDelta | None]) -> list[TokenDelta | None]:
    """What a reader gets that comes when all of `deltas` wait."""

    async def read() -> list[TokenDelta | None]:
        inbox = Inbox()
        for delta in deltas:
            inbox.put_nowait(delta)
        out: list[TokenDelta | None] = []
        while not inbox.empty():
            out += await inbox.take()
        return out

    return asyncio.run(read())


def test_client_that_keeps_up_gets_every_delta_by_itself():
    deltas = sequence("a", MAX_UNMERGED, None)
    assert taken(list(deltas)) == deltas


def test_client_that_is_far_behind_gets_one_delta_per_sequence():
    deltas = [d for pair in zip(sequence("a", 50, "stop"), sequence("b", 50, None), strict=False) for d in pair]
    first, second = taken([*deltas, None])[:2]
    assert [first.request_id, second.request_id] == ["a", "b"]
    assert first.token_ids == second.token_ids == list(range(50))
    assert taken([*deltas, None])[-1] is None


def test_gap_within_a_backlog_stays_visible():
    deltas = sequence("a", 2 * MAX_UNMERGED, None)
    got = taken(deltas[:MAX_UNMERGED] + deltas[MAX_UNMERGED + 1 :])
    assert [(d.position, len(d.token_ids)) for d in got] == [(0, MAX_UNMERGED), (MAX_UNMERGED + 1, MAX_UNMERGED - 1)]


@settings(deadline=None)
@given(st.integers(0, 80), ENDS, st.integers(0, 80), ENDS)
def test_nothing_is_lost_or_reordered_within_a_sequence(a, end_a, b, end_b):
    sent = [*sequence("a", a, end_a), *sequence("b", b, end_b)]
    got = taken(list(sent))
    for name in ("a", "b"):
        before, after = ([d for d in deltas if d.request_id == name] for deltas in (sent, got))
        assert [t for d in after for t in d.token_ids] == [t for d in before for t in d.token_ids]
        assert [p for d in after for p in d.logprobs or []] == [p for d in before for p in d.logprobs or []]
        assert sum(d.num_cached_tokens for d in after) == sum(d.num_cached_tokens for d in before)
        if before:
            assert after[-1].finish_reason == before[-1].finish_reason
            assert (after[-1].error, after[-1].times) == (before[-1].error, before[-1].times)
            assert [e for d in after for e in d.timeline] == [e for d in before for e in d.timeline]
            assert all(d.finish_reason is None for d in after[:-1])
