"""The router's end of the engines' KV event channels: one ZMQ socket for all of them. Independent of Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec
import zmq
import zmq.asyncio

from engine.distributed.cluster_key import ClusterKey
from engine.distributed.sockets import PullSocket, PushSockets
from engine.wire.messages import SUBSCRIPTION_S, EngineUpdate, Subscribe

logger = logging.getLogger(__name__)

RENEW_S = SUBSCRIPTION_S / 3


class KVEventSubscriber:
    """Subscribes to engines, and asks for a new snapshot when an engine's update was lost."""

    def __init__(self, host: str, on_update: Callable[[EngineUpdate], bool], key: ClusterKey | None = None):
        """host: address at which engines reach this machine.
        on_update: function that handles an update, and returns False if it needs a snapshot first.
        key: cluster key, shared with all engines."""
        self._on_update = on_update
        self._awaiting_snapshot: set[str] = set()
        self._engines: dict[str, str] = {}  # engine id -> address on which it takes commands
        self._context = zmq.asyncio.Context()
        self._updates: PullSocket[EngineUpdate] = PullSocket(
            self._context, host, EngineUpdate, name="engine_updates", key=key
        )
        self._out = PushSockets(zmq.Context(self._context), key=key)

    def subscribe(self, engines: Mapping[str, str]) -> None:
        """Subscribe to these engines, and unsubscribe from all others. engines: command address by engine id."""
        for engine_id in self._engines.keys() - engines:
            self._out.forget(self._engines.pop(engine_id))
            self._awaiting_snapshot.discard(engine_id)
        for engine_id in engines.keys() - self._engines:
            self._engines[engine_id] = engines[engine_id]
            self._send(engine_id, resync=True)

    async def run(self) -> None:
        """Receive updates until cancelled, then close the sockets."""
        renewing = asyncio.create_task(self._renew())
        try:
            await self._updates.serve(self._handle)
        finally:
            renewing.cancel()
            self._out.close()  # its sockets belong to a shadow context, which `destroy` does not close
            self._context.destroy(linger=0)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            for engine_id in self._engines:
                self._send(engine_id, resync=engine_id in self._awaiting_snapshot)

    def _handle(self, update: EngineUpdate) -> None:
        if update.engine_id not in self._engines:
            return  # Serve has reported it gone
        if self._on_update(update):
            self._awaiting_snapshot.discard(update.engine_id)
        elif update.engine_id not in self._awaiting_snapshot:
            logger.info("lost an update engine_id=%s before number=%d", update.engine_id, update.number)
            self._send(update.engine_id, resync=True)

    def _send(self, engine_id: str, *, resync: bool) -> None:
        if resync:
            self._awaiting_snapshot.add(engine_id)
        self._out.send(self._engines[engine_id], msgspec.msgpack.encode(Subscribe(self._updates.address, resync)))
