from __future__ import annotations

import asyncio

import msgspec
import zmq

from deployments.token_channel import TokenChannel
from engine.messages import TokenBatch, TokenDelta
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
