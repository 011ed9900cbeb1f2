"""Sockets of the control side of one engine. Independent of Ray."""

from __future__ import annotations

from collections.abc import Mapping

import zmq
import zmq.asyncio

from deployments.replicas.engine_control import EngineControl
from deployments.replicas.remote_dispatcher import RemotePool
from engine.distributed.cluster_key import ClusterKey
from engine.distributed.sockets import PullSocket
from engine.wire.messages import Notice, kinds_of
from engine.wire.stats.handoff_stats import PeerPool


class EngineReplica(EngineControl):
    """One engine as its replica sees it, over ZMQ."""

    def __init__(
        self,
        host: str,
        stall_timeout_s: float = 10.0,
        peers: Mapping[PeerPool, RemotePool] | None = None,
        key: ClusterKey | None = None,
        node: str = "",
    ):
        """host: address of this machine at which the engine reaches `status_to`. key: cluster key of the engine's
        sockets. The others are those of EngineControl."""
        super().__init__(stall_timeout_s, peers, node)
        self._context = zmq.asyncio.Context()
        self._notices: PullSocket[Notice] = PullSocket(
            self._context, host, kinds_of(Notice), name="engine_notices", key=key
        )
        self.status_to = self._notices.address
        self._commands = zmq.Context(self._context).socket(zmq.PUSH)
        self._commands.setsockopt(zmq.SNDHWM, 0)
        if key is not None:
            key.guard_connector(self._commands)

    def connect(self, engine_address: str) -> None:
        self._commands.connect(engine_address)
        self._status_at = self._now()

    async def run(self) -> None:
        """Receive notices until cancelled, then close the sockets."""
        self.start()
        try:
            await self._notices.serve(self.handle)
        finally:
            self.close()
            self._commands.close(linger=0)  # it belongs to a shadow context, which `destroy` does not close
            self._context.destroy(linger=0)

    def send(self, command: bytes) -> None:
        self._commands.send(command, zmq.NOBLOCK)
