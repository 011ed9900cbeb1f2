"""ZMQ socket at which the tokens of all engines arrive in an ingress."""

from __future__ import annotations

import zmq
import zmq.asyncio

from deployments.frontend.inboxes import Inboxes
from deployments.observability.stats import IngressStats
from engine.distributed.cluster_key import ClusterKey
from engine.distributed.sockets import PullSocket, PushSockets
from engine.wire.token_delta import TokenBatch


class TokenChannel(Inboxes):
    """Inboxes that are filled by the engines, over ZMQ."""

    def __init__(self, host: str, stats: IngressStats, key: ClusterKey | None = None):
        """host: address at which engines reach this machine. key: cluster key, shared with all engines."""
        super().__init__(stats)
        self._context = zmq.asyncio.Context()
        self._batches: PullSocket[TokenBatch] = PullSocket(self._context, host, TokenBatch, name="tokens", key=key)
        self._engines = PushSockets(zmq.Context(self._context), key=key)
        self.address = self._batches.address

    def send(self, address: str, message: bytes) -> None:
        self._engines.forget_unused()
        self._engines.send(address, message)

    async def run(self) -> None:
        """Dispatch until cancelled, then close the socket."""
        try:
            await self._batches.serve(self.dispatch)
        finally:
            self._engines.close()  # its sockets belong to a shadow context, which `destroy` does not close
            self._context.destroy(linger=0)
