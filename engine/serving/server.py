"""ZMQ sockets of an engine core: requests come in and tokens go out as msgspec messages."""

from __future__ import annotations

import math
import threading

import zmq

from engine.assembly.build import build_engine
from engine.clock import SYSTEM_CLOCK
from engine.config import EngineConfig
from engine.distributed.sockets import PullSocket, PushSockets, Waker
from engine.distributed.tp_group import TPGroup
from engine.serving.endpoint import EngineEndpoint
from engine.wire.messages import Command, kinds_of

QUEUED_MESSAGES = 100_000  # per receiver that does not take them; further ones are dropped
POLL_MS = 200  # while there is nothing to compute


class EngineServer:
    """Serves an EngineCore in the process of rank 0.

    Takes `Command`s on a PULL socket at `address`. Pushes:
    - one `TokenBatch` per step to each ingress with requests in that step,
    - an `EngineStatus` to the control actor whenever requests end, and at least once a second,
    - requests for prefill by other engines, also to the control actor,
    - an `EngineUpdate` to each router that subscribes.

    The loop waits for commands and handoffs while there is nothing to compute. Sending never blocks it: messages that a
    vanished peer does not take are dropped with its socket. What the commands do is in serving/endpoint.py.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        engine_id: str,
        status_to: str,
        host: str = "127.0.0.1",
        group: TPGroup | None = None,
    ):
        """status_to: address of the control actor. group: as for build_engine; only peers with its key can send
        commands or receive messages."""
        group = group or TPGroup.single()
        self.engine_id = engine_id
        self._waker = Waker()
        self._core = build_engine(config, group, engine_id=engine_id, host=host, wake=self._waker.wake)
        self.max_model_len = self._core.max_model_len
        self.journal = self._core.journal
        self._context = zmq.Context()
        self._inbox: PullSocket[Command] = PullSocket(
            self._context, host, kinds_of(Command), name="commands", key=group.key
        )
        self.address = self._inbox.address
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._poller.register(self._waker, zmq.POLLIN)
        self._endpoint = EngineEndpoint(
            self._core,
            PushSockets(self._context, {zmq.SNDHWM: QUEUED_MESSAGES}, group.key),
            engine_id=engine_id,
            address=self.address,
            status_to=status_to,
            clock=SYSTEM_CLOCK,
        )
        self._stopping = threading.Event()

    def run(self) -> None:
        """Serve until `stop` is called from another thread, then close the sockets and end the other ranks.

        Raises EngineUnavailable if another rank dies.
        """
        try:
            while not self._stopping.is_set():
                self._receive()
                self._endpoint.send(self._core.step())
        finally:
            self._core.close()
            self._context.destroy(linger=0)
            self._waker.close()

    def stop(self) -> None:
        self._stopping.set()
        self._waker.wake()

    def _receive(self) -> None:
        """Handle all received commands; wait for one while there is nothing to compute."""
        next_update_s = self._endpoint.wait_s()
        wait_ms = POLL_MS if next_update_s is None else min(POLL_MS, math.ceil(next_update_s * 1000))
        if self._core.idle and self._waker.fileno() in dict(self._poller.poll(wait_ms)):
            self._waker.clear()
        for command in self._inbox.messages():
            self._endpoint.handle(command)
