from __future__ import annotations

import asyncio

import msgspec
import zmq

from deployments.frontend.token_channel import TokenChannel
from engine.wire.messages import Abort, Command, TokenBatch, TokenDelta
from tests.deployments.fake_api import until


def test_deltas_reach_the_inbox_of_their_request_and_others_are_counted():
    async def scenario() -> None:
        channel = TokenChannel("127.0.0.1")
        task = asyncio.create_task(channel.run())
        ours, theirs = channel.open(["a", "b"]), channel.open(["c"])
        with zmq.Context() as context, context.socket(zmq.PUSH) as engine:
            engine.connect(channel.address)
            engine.send(b"no message of ours")
            deltas = [TokenDelta(request_id=name, token_ids=[1]) for name in ("a", "c", "unknown", "b")]
            engine.send(msgspec.msgpack.encode(TokenBatch(engine_id="fake", commands_to="", step=1, deltas=deltas)))
            async with asyncio.timeout(5):
                got = [await ours.get(), await ours.get()]
                assert [delta and delta.request_id for delta in got] == ["a", "b"]
                assert (await theirs.get()) == deltas[1]
            assert channel.dropped == 1
            channel.close(["a", "b"])
            engine.send(msgspec.msgpack.encode(TokenBatch(engine_id="fake", commands_to="", step=2, deltas=deltas)))
            await until(lambda: channel.dropped == 4)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_stop_goes_to_the_engine_that_works_for_the_request_and_unused_sockets_are_closed(monkeypatch):
    monkeypatch.setattr("engine.distributed.sockets.FORGET_S", -1.0)  # each stop forgets all engines before it

    async def scenario() -> None:
        channel = TokenChannel("127.0.0.1")
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
                await inbox.get()
            for name, engine in zip("abc", [*engines, engines[1]], strict=True):
                channel.abort(name, "stop")
                assert await asyncio.to_thread(engine.poll, 5000), f"no command for {name}"
                assert msgspec.msgpack.decode(engine.recv(), type=Command) == Abort(name, "stop")
            assert len(channel._engines._sockets) == 1
            for engine in engines:
                engine.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_request_that_moves_keeps_its_inbox_after_its_old_engine_was_told_to_drop_it():
    async def scenario() -> None:
        channel = TokenChannel("127.0.0.1")
        task = asyncio.create_task(channel.run())
        inbox = channel.open(["a", "b"])
        with zmq.Context() as context, context.socket(zmq.PUSH) as tokens, context.socket(zmq.PULL) as engine:
            tokens.connect(channel.address)
            address = f"tcp://127.0.0.1:{engine.bind_to_random_port('tcp://127.0.0.1')}"

            def say(name: str) -> None:
                delta = TokenDelta(request_id=name, token_ids=[1])
                batch = TokenBatch(engine_id="fake", commands_to=address, step=1, deltas=[delta])
                tokens.send(msgspec.msgpack.encode(batch))

            async with asyncio.timeout(5):
                say("a")
                await inbox.get()
                channel.abort("a")
                channel.abort("b")  # no engine is known to work for it
                channel.move("a", "a.1")
                channel.move("b", "b.1")
                assert await asyncio.to_thread(engine.poll, 5000)
                assert msgspec.msgpack.decode(engine.recv(), type=Command) == Abort("a", "abort")
                for name in ("a", "b", "b.1", "a.1"):
                    say(name)
                got = [await inbox.get(), await inbox.get()]
            assert [delta and delta.request_id for delta in got] == ["b.1", "a.1"]
            assert channel.dropped == 2
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), 30))
