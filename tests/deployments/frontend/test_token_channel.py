from __future__ import annotations

import asyncio

import msgspec
import zmq
from hypothesis import given
from hypothesis import strategies as st

from deployments.frontend.inboxes import MAX_UNMERGED, Inbox
from deployments.frontend.token_channel import TokenChannel
from deployments.observability.stats import IngressStats
from engine.wire.messages import Abort, Command, kinds_of
from engine.wire.part_record import told
from engine.wire.parts.speculation import Verified
from engine.wire.timeline import TimelineEvent
from engine.wire.token_delta import ErrorInfo, RequestTimes, TokenBatch, TokenDelta, TokenLogprob
from tests.deployments.fake_api import until
from tests.refused import Refused

ENDS = st.sampled_from(["stop", "length", "error", None])


async def test_deltas_reach_the_inbox_of_their_request_and_others_are_counted():
    stats, refused = IngressStats("ingress-1"), Refused("tokens", "malformed")
    channel = TokenChannel("127.0.0.1", stats)
    task = asyncio.create_task(channel.run())
    ours, theirs = channel.open(["a", "b"]), channel.open(["c"])
    with zmq.Context() as context, context.socket(zmq.PUSH) as engine:
        engine.connect(channel.address)
        engine.send(b"no message of ours")
        deltas = [TokenDelta(request_id=name, token_ids=[1]) for name in ("a", "c", "unknown", "b")]
        engine.send(msgspec.msgpack.encode(TokenBatch(engine_id="fake", commands_to="", step=1, deltas=deltas)))
        async with asyncio.timeout(60):
            got = await ours.take()
            assert [delta and delta.request_id for delta in got] == ["a", "b"]
            assert await theirs.take() == [deltas[1]]
        assert (stats.dropped_deltas, refused.count) == (1, 1)
        channel.close(["a", "b"])
        engine.send(msgspec.msgpack.encode(TokenBatch(engine_id="fake", commands_to="", step=2, deltas=deltas)))
        await until(lambda: stats.dropped_deltas == 4)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_stop_goes_to_the_engine_that_works_for_the_request_and_unused_sockets_are_closed(monkeypatch):
    monkeypatch.setattr("engine.distributed.sockets.FORGET_S", -1.0)  # each stop forgets all engines before it
    stats = IngressStats("ingress-1")
    channel = TokenChannel("127.0.0.1", stats)
    task = asyncio.create_task(channel.run())
    inbox = channel.open(["a", "b", "c"])
    with zmq.Context() as context, context.socket(zmq.PUSH) as tokens:
        tokens.connect(channel.address)
        engines = [context.socket(zmq.PULL) for _ in range(2)]
        addresses = [f"tcp://127.0.0.1:{engine.bind_to_random_port('tcp://127.0.0.1')}" for engine in engines]
        for name, address in zip("abc", [*addresses, addresses[1]], strict=True):
            delta = TokenDelta(request_id=name, token_ids=[1])
            batch = TokenBatch(engine_id="fake", commands_to=address, step=1, deltas=[delta])
            tokens.send(msgspec.msgpack.encode(batch))
            await inbox.take()
        for name, engine in zip("abc", [*engines, engines[1]], strict=True):
            channel.abort(name, "stop")
            assert await asyncio.to_thread(engine.poll, 5000), f"no command for {name}"
            assert msgspec.msgpack.decode(engine.recv(), type=kinds_of(Command)) == Abort(name, "stop")
        assert len(channel._engines._sockets) == 1
        for engine in engines:
            engine.close()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_request_that_moves_keeps_its_inbox_after_its_old_engine_was_told_to_drop_it():
    stats = IngressStats("ingress-1")
    channel = TokenChannel("127.0.0.1", stats)
    task = asyncio.create_task(channel.run())
    inbox = channel.open(["a", "b"])
    with zmq.Context() as context, context.socket(zmq.PUSH) as tokens, context.socket(zmq.PULL) as engine:
        tokens.connect(channel.address)
        address = f"tcp://127.0.0.1:{engine.bind_to_random_port('tcp://127.0.0.1')}"

        def say(name: str) -> None:
            delta = TokenDelta(request_id=name, token_ids=[1])
            batch = TokenBatch(engine_id="fake", commands_to=address, step=1, deltas=[delta])
            tokens.send(msgspec.msgpack.encode(batch))

        async with asyncio.timeout(60):
            say("a")
            await inbox.take()
            channel.abort("a")
            channel.abort("b")  # no engine is known to work for it
            channel.move("a", "a.1")
            channel.move("b", "b.1")
            assert await asyncio.to_thread(engine.poll, 5000)
            assert msgspec.msgpack.decode(engine.recv(), type=kinds_of(Command)) == Abort("a", "abort")
            for name in ("a", "b", "b.1", "a.1"):
                say(name)
            got = await inbox.take()
            while len(got) < 2:
                got += await inbox.take()
        assert [delta and delta.request_id for delta in got] == ["b.1", "a.1"]
        assert stats.dropped_deltas == 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


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
            parts=told([Verified(i, 1)] if i % 3 == 0 else []),
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
            inbox.put(delta)
        return await inbox.take()

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


def test_what_comes_with_the_first_token_is_kept_behind_the_timeline_of_a_request_that_waited():
    waited = TokenDelta(request_id="a", timeline=[TimelineEvent(0.0, "", "preempted")])
    tokens = sequence("a", 2 * MAX_UNMERGED, "stop")
    tokens[0] = msgspec.structs.replace(tokens[0], prompt_logprobs=[None, logprob(3)])
    (whole,) = taken([waited, *tokens])
    assert (whole.num_cached_tokens, whole.prompt_logprobs) == (7, [None, logprob(3)])
    assert whole.timeline[0] == waited.timeline[0]


@given(st.integers(0, 80), ENDS, st.integers(0, 80), ENDS)
def test_nothing_is_lost_or_reordered_within_a_sequence(a, end_a, b, end_b):
    sent = [*sequence("a", a, end_a), *sequence("b", b, end_b)]
    got = taken(list(sent)) if sent else []  # else it would wait for one
    for name in ("a", "b"):
        before, after = ([d for d in deltas if d.request_id == name] for deltas in (sent, got))
        assert [t for d in after for t in d.token_ids] == [t for d in before for t in d.token_ids]
        assert [p for d in after for p in d.logprobs or []] == [p for d in before for p in d.logprobs or []]
        assert sum(d.num_cached_tokens for d in after) == sum(d.num_cached_tokens for d in before)
        assert [r for d in after for r in d.records(Verified)] == [r for d in before for r in d.records(Verified)]
        if before:
            assert after[-1].finish_reason == before[-1].finish_reason
            assert (after[-1].error, after[-1].times) == (before[-1].error, before[-1].times)
            assert [e for d in after for e in d.timeline] == [e for d in before for e in d.timeline]
            assert all(d.finish_reason is None for d in after[:-1])
