"""A router's end of the KV event channel, with engines' sockets at the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec
import zmq
import zmq.asyncio

from deployments.routing.subscriber import KVEventSubscriber
from engine.wire.messages import Command, EngineUpdate, Subscribe, kinds_of
from engine.wire.stats.engine_stats import EngineLoad
from tests.refused import Refused

LIMIT_S = 60.0


class Inbox:
    """Where an engine takes commands, and from where it sends its updates."""

    def __init__(self, name: str):
        self.name = name
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._out = self._context.socket(zmq.PUSH)
        self._connected = ""

    async def subscription(self) -> Subscribe:
        async with asyncio.timeout(LIMIT_S):
            command = msgspec.msgpack.decode(await self._socket.recv(), type=kinds_of(Command))
        assert isinstance(command, Subscribe)
        return command

    async def send(self, to: Subscribe, number: int, *, snapshot: bool = False, name: str | None = None) -> None:
        update = EngineUpdate(
            engine_id=name or self.name,
            number=number,
            snapshot=snapshot,
            load=EngineLoad(sequences=number),
            stored=b"",
            removed=b"",
            admitted=[],
            prefilled=[],
        )
        await self.send_bytes(to, msgspec.msgpack.encode(update))

    async def send_bytes(self, to: Subscribe, message: bytes) -> None:
        if self._connected != to.address:
            self._out.connect(to.address)
            self._connected = to.address
        await self._out.send(message)

    async def is_asked(self) -> bool:
        return bool(await self._socket.poll(0))

    def close(self) -> None:
        self._context.destroy(linger=0)


class Recorder:
    """understands: what it answers to the next update."""

    def __init__(self) -> None:
        self.understands = True
        self._queue: asyncio.Queue[EngineUpdate] = asyncio.Queue()

    def take(self, update: EngineUpdate) -> bool:
        self._queue.put_nowait(update)
        return self.understands

    async def next(self) -> EngineUpdate:
        async with asyncio.timeout(LIMIT_S):
            return await self._queue.get()


@asynccontextmanager
async def channel(recorder: Recorder, *engines: Inbox) -> AsyncGenerator[KVEventSubscriber]:
    made = KVEventSubscriber("127.0.0.1", recorder.take)
    task = asyncio.create_task(made.run())
    made.subscribe({engine.name: engine.address for engine in engines})
    await asyncio.sleep(0)
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for engine in engines:
            engine.close()


async def test_an_engine_is_asked_for_a_snapshot_once_and_again_when_updates_were_lost():
    recorder, engine = Recorder(), Inbox("e")
    async with channel(recorder, engine):
        asked = await engine.subscription()
        assert asked.resync
        await engine.send(asked, 4, snapshot=True)
        assert (await recorder.next()).number == 4
        recorder.understands = False
        for number in (6, 7):
            await engine.send(asked, number)
            await recorder.next()
        assert (await engine.subscription()).resync
        assert not await engine.is_asked(), "it was asked already"
        recorder.understands = True
        await engine.send(asked, 7, snapshot=True)
        await recorder.next()
        recorder.understands = False
        await engine.send(asked, 9)
        await recorder.next()
        assert (await engine.subscription()).resync


async def test_subscriptions_are_renewed(monkeypatch):
    monkeypatch.setattr("deployments.routing.subscriptions.RENEW_S", 0.01)
    recorder, engine = Recorder(), Inbox("e")
    async with channel(recorder, engine):
        asked = await engine.subscription()
        assert (await engine.subscription()).resync, "the snapshot has not come yet"
        await engine.send(asked, 1, snapshot=True)
        await recorder.next()
        while (await engine.subscription()).resync:
            pass  # those that were sent before it came


async def test_updates_of_an_engine_that_is_gone_are_dropped():
    recorder, stays, goes = Recorder(), Inbox("stays"), Inbox("goes")
    async with channel(recorder, stays, goes) as made:
        asked = await stays.subscription()
        made.subscribe({"stays": stays.address})
        await stays.send(asked, 1, snapshot=True, name="goes")
        await stays.send(asked, 1, snapshot=True)
        assert (await recorder.next()).engine_id == "stays"


async def test_malformed_updates_are_dropped():
    recorder, engine, refused = Recorder(), Inbox("e"), Refused("engine_updates", "malformed")
    async with channel(recorder, engine):
        asked = await engine.subscription()
        await engine.send_bytes(asked, b"nonsense")
        await engine.send(asked, 1, snapshot=True)
        assert (await recorder.next()).number == 1
        assert refused.count == 1
