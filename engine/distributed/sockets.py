"""ZMQ sockets to many receivers, and a waker for a thread that polls sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from contextlib import suppress

import zmq

FORGET_S = 60.0  # since the last message to a receiver, after which it counts as unused


class PushSockets:
    """A PUSH socket for each receiver, made when it is first needed; for one thread.

    Sending never blocks. Messages that a receiver does not take are kept until its socket is forgotten or closed.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], options: Mapping[int, int] | None = None):
        """options: of ZMQ. zmq.SNDHWM limits the messages that are kept for a receiver; later ones are lost."""
        self._context = context
        self._options = {zmq.LINGER: 0, zmq.SNDHWM: 0, **(options or {})}
        self._sockets: dict[str, tuple[zmq.Socket[bytes], float]] = {}  # by address, and last used at

    def connect(self, address: str) -> None:
        """Make the socket if there is none. Raises zmq.ZMQError for an invalid address."""
        if address in self._sockets:
            return
        socket = self._context.socket(zmq.PUSH)
        for option, value in self._options.items():
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.IPV6, "[" in address)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close()
            raise
        self._sockets[address] = (socket, time.monotonic())

    def send(self, address: str, message: bytes) -> bool:
        """Return False if too many messages are kept for the receiver, and this one is lost. Raises like `connect`."""
        self.connect(address)
        socket, _ = self._sockets[address]
        self._sockets[address] = (socket, time.monotonic())
        try:
            socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def forget(self, address: str) -> None:
        if address in self._sockets:
            self._sockets.pop(address)[0].close()

    def forget_unused(self) -> None:
        now = time.monotonic()
        for address in [a for a, (_, used_at) in self._sockets.items() if now - used_at > FORGET_S]:
            self.forget(address)

    def close(self) -> None:
        """Close all sockets; messages that are still kept are lost."""
        for address in list(self._sockets):
            self.forget(address)


class Waker:
    """Ends the wait of a poller with which it is registered; pollers take any object with a `fileno`."""

    def __init__(self) -> None:
        self._sender, self._receiver = socket.socketpair()
        self._sender.setblocking(False)
        self._receiver.setblocking(False)

    def fileno(self) -> int:
        return self._receiver.fileno()

    def wake(self) -> None:
        """Wake the poller, from any thread. Never blocks; does nothing after `close`."""
        with suppress(OSError):  # full, so the poller is about to wake; or closed
            self._sender.send(b"\0")

    def clear(self) -> None:
        """Reset the waker after the poller found it ready."""
        self._receiver.recv(4096)

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()
