"""A router's end of the news, with engines' sockets at the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec
import zmq
import zmq.asyncio

from deployments.routing.subscriber import KVEventSubscriber
from engine.wire.messages import Command, EngineLoad, EngineUpdate, Subscribe

LIMIT_S = 10.0


class Inbox:
    """Where an engine takes commands, and from where it sends its news."""

    def __init__(self, name: str):
        self.name = name
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._out = self._context.socket(zmq.PUSH)
        self._connected = ""

    async def follow(self) -> Subscribe:
        async with asyncio.timeout(LIMIT_S):
            command = msgspec.msgpack.decode(await self._socket.recv(), type=Command)
        assert isinstance(command, Subscribe)
        return command

    async def send(self, to: Subscribe, number: int, *, snapshot: bool = False, name: str | None = None) -> None:
        news = EngineUpdate(
            engine_id=name or self.name,
            number=number,
            snapshot=snapshot,
            load=EngineLoad(sequences=number),
            stored=b"",
            removed=b"",
            taken=[],
            settled=[],
        )
        await self.send_bytes(to, msgspec.msgpack.encode(news))

    async def send_bytes(self, to: Subscribe, message: bytes) -> None:
        if self._connected != to.address:
            self._out.connect(to.address)
            self._connected = to.address
        await self._out.send(message)

    async def is_asked(self) -> bool:
        return bool(await self._socket.poll(0))

    def close(self) -> None:
        self._context.destroy(linger=0)


class Taker:
    """understands: what it answers to the next news."""

    def __init__(self) -> None:
        self.understands = True
        self._queue: asyncio.Queue[EngineUpdate] = asyncio.Queue()

    def take(self, news: EngineUpdate) -> bool:
        self._queue.put_nowait(news)
        return self.understands

    async def next(self) -> EngineUpdate:
        async with asyncio.timeout(LIMIT_S):
            return await self._queue.get()


@asynccontextmanager
async def channel(taker: Taker, *engines: Inbox) -> AsyncGenerator[KVEventSubscriber]:
    made = KVEventSubscriber("127.0.0.1", taker.take)
    task = asyncio.create_task(made.run())
    made.follow({engine.name: engine.address for engine in engines})
    await asyncio.sleep(0)
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for engine in engines:
            engine.close()


def test_an_engine_is_asked_for_a_snapshot_once_and_again_when_news_were_lost():
    async def scenario() -> None:
        taker, engine = Taker(), Inbox("e")
        async with channel(taker, engine):
            asked = await engine.follow()
            assert asked.again
            await engine.send(asked, 4, snapshot=True)
            assert (await taker.next()).number == 4
            taker.understands = False
            for number in (6, 7):
                await engine.send(asked, number)
                await taker.next()
            assert (await engine.follow()).again
            assert not await engine.is_asked(), "it was asked already"
            taker.understands = True
            await engine.send(asked, 7, snapshot=True)
            await taker.next()
            taker.understands = False
            await engine.send(asked, 9)
            await taker.next()
            assert (await engine.follow()).again

    asyncio.run(scenario())


def test_engines_are_told_that_they_are_still_followed(monkeypatch):
    monkeypatch.setattr("deployments.routing.subscriber.RENEW_S", 0.01)

    async def scenario() -> None:
        taker, engine = Taker(), Inbox("e")
        async with channel(taker, engine):
            asked = await engine.follow()
            assert (await engine.follow()).again, "the snapshot has not come yet"
            await engine.send(asked, 1, snapshot=True)
            await taker.next()
            while (await engine.follow()).again:
                pass  # those that were sent before it came

    asyncio.run(scenario())


def test_news_of_an_engine_that_is_gone_are_not_heard():
    async def scenario() -> None:
        taker, stays, goes = Taker(), Inbox("stays"), Inbox("goes")
        async with channel(taker, stays, goes) as made:
            asked = await stays.follow()
            made.follow({"stays": stays.address})
            await stays.send(asked, 1, snapshot=True, name="goes")
            await stays.send(asked, 1, snapshot=True)
            assert (await taker.next()).engine_id == "stays"

    asyncio.run(scenario())


def test_malformed_news_are_dropped():
    async def scenario() -> None:
        taker, engine = Taker(), Inbox("e")
        async with channel(taker, engine):
            asked = await engine.follow()
            await engine.send_bytes(asked, b"nonsense")
            await engine.send(asked, 1, snapshot=True)
            assert (await taker.next()).number == 1

    asyncio.run(scenario())
