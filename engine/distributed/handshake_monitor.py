"""Watches the handshakes of a bound ZMQ socket."""

from __future__ import annotations

import struct
import time
import uuid
from contextlib import suppress
from typing import Any

import zmq

from engine.distributed.refusals import REFUSALS

LOOK_S = 1.0  # between two polls for peers that were turned away
FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILED | zmq.EVENT_DISCONNECTED


class HandshakeMonitor:
    """Counts the peers that ZMQ turns away from a bound socket. Without the cluster's key, nothing they send is read.

    A peer that does not speak ZMQ may be missed if it connects and disconnects while another peer's handshake ends.
    """

    def __init__(self, context: zmq.Context[Any], listener: zmq.Socket[Any], name: str):
        self._name = name
        self._look_at = 0.0
        self._handshakes = 0  # number of ended handshakes
        self._accepted: dict[int, int] = {}  # file descriptor of a connection -> `_handshakes` when it was accepted
        address = f"inproc://{uuid.uuid4().hex}"
        listener.monitor(address, EVENTS)
        self._events: Any = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 0)  # no limit, or ZMQ's own thread would block until events are read
        self._events.connect(address)

    def look(self) -> None:
        """Count the peers turned away since the last call. Does nothing if the last call was less than LOOK_S ago."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        with suppress(zmq.Again):
            while True:
                self._count(self._events.recv_multipart(zmq.NOBLOCK))

    async def watch(self) -> None:
        """Count peers until cancelled. Requires a zmq.asyncio context."""
        while True:
            self._count(await self._events.recv_multipart())

    def _count(self, message: list[bytes]) -> None:
        event, value = struct.unpack("=hi", message[0])
        if event == zmq.EVENT_ACCEPTED:
            self._accepted[value] = self._handshakes
            return
        if event == zmq.EVENT_DISCONNECTED:
            failed = self._accepted.pop(value, None) == self._handshakes
        else:
            self._handshakes += 1
            failed = event != zmq.EVENT_HANDSHAKE_SUCCEEDED
        if failed:
            REFUSALS.add(self._name, "unauthenticated", "a peer without the cluster's key")
