"""The router's socket for the updates of all engines. Independent of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq
import zmq.asyncio

from deployments.routing.subscriptions import Subscriptions
from engine.distributed.cluster_key import ClusterKey
from engine.distributed.sockets import PullSocket, PushSockets
from engine.wire.messages import EngineUpdate


class KVEventSubscriber(Subscriptions):
    """Subscriptions whose updates arrive over ZMQ."""

    def __init__(self, host: str, on_update: Callable[[EngineUpdate], bool], key: ClusterKey | None = None):
        """host: address at which engines reach this machine. on_update: as for Subscriptions.
        key: cluster key, shared with all engines."""
        super().__init__(on_update)
        self._context = zmq.asyncio.Context()
        self._updates: PullSocket[EngineUpdate] = PullSocket(
            self._context, host, EngineUpdate, name="engine_updates", key=key
        )
        self._out = PushSockets(zmq.Context(self._context), key=key)
        self.address = self._updates.address

    def send(self, address: str, message: bytes) -> None:
        self._out.send(address, message)

    def forget(self, address: str) -> None:
        self._out.forget(address)

    async def run(self) -> None:
        """Receive updates until cancelled, then close the sockets."""
        renewing = asyncio.create_task(self.renew())
        try:
            await self._updates.serve(self.handle)
        finally:
            renewing.cancel()
            self._out.close()  # its sockets belong to a shadow context, which `destroy` does not close
            self._context.destroy(linger=0)
