"""The router's end of the engines' KV event channels: one ZMQ socket for all of them. Knows no Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec
import zmq
import zmq.asyncio

from engine.distributed.sockets import PushSockets
from engine.wire.messages import SUBSCRIPTION_S, EngineUpdate, Subscribe

logger = logging.getLogger(__name__)

RENEW_S = SUBSCRIPTION_S / 3


class KVEventSubscriber:
    """Subscribes to engines, and asks one again for a snapshot when a message of it was lost."""

    def __init__(self, host: str, on_update: Callable[[EngineUpdate], bool]):
        """host: address of this machine that engines reach. on_update: returns False if it needs a snapshot first."""
        self._on_update = on_update
        self._asked: set[str] = set()  # engines that were asked for a snapshot, which has not come yet
        self._engines: dict[str, str] = {}  # by id: where it takes commands
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self._address = f"tcp://{host}:{port}"
        self._out = PushSockets(zmq.Context(self._context))
        self._decode = msgspec.msgpack.Decoder(EngineUpdate).decode

    def subscribe(self, engines: Mapping[str, str]) -> None:
        """From now on these and no others. engines: by id, the address where each takes commands."""
        for engine_id in [e for e in self._engines if e not in engines]:
            self._out.forget(self._engines.pop(engine_id))
            self._asked.discard(engine_id)
        for engine_id in [e for e in engines if e not in self._engines]:
            self._engines[engine_id] = engines[engine_id]
            self._ask(engine_id, resync=True)

    async def run(self) -> None:
        """Receive updates until cancelled, then close the sockets."""
        renewing = asyncio.create_task(self._renew())
        try:
            while True:
                self._handle(await self._socket.recv())
        finally:
            renewing.cancel()
            self._out.close()  # its sockets are of a shadow context, which `destroy` does not know
            self._context.destroy(linger=0)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            for engine_id in self._engines:
                self._ask(engine_id, resync=engine_id in self._asked)

    def _handle(self, message: bytes) -> None:
        try:
            update = self._decode(message)
        except msgspec.MsgspecError as error:
            logger.error("dropped a malformed engine update: %s", error)
            return
        if update.engine_id not in self._engines:
            return  # it is gone, for all that Serve says
        if self._on_update(update):
            self._asked.discard(update.engine_id)
        elif update.engine_id not in self._asked:
            logger.info("lost an update of engine_id=%s before number=%d", update.engine_id, update.number)
            self._ask(update.engine_id, resync=True)

    def _ask(self, engine_id: str, *, resync: bool) -> None:
        if resync:
            self._asked.add(engine_id)
        self._out.send(self._engines[engine_id], msgspec.msgpack.encode(Subscribe(self._address, resync)))
