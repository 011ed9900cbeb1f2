"""ZMQ sockets to many receivers, and what ends the wait of a thread that polls sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from contextlib import suppress

import zmq

FORGET_S = 60.0  # for which a receiver must have been sent nothing to be unused


class PushSockets:
    """A PUSH socket for each receiver, made when it is first needed. For one thread.

    Sending never blocks. What a receiver does not take is kept until its socket is forgotten or closed.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], options: Mapping[int, int] | None = None):
        """options: of ZMQ. With a zmq.SNDHWM, only so many messages are kept for a receiver, the oldest ones."""
        self._context = context
        self._options = {zmq.LINGER: 0, zmq.SNDHWM: 0, **(options or {})}
        self._sockets: dict[str, tuple[zmq.Socket[bytes], float]] = {}  # by address; when used last

    def connect(self, address: str) -> None:
        """Raises zmq.ZMQError if this is no address."""
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
        """False if too many messages are kept for it: this one is lost. Raises as `connect`."""
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
        """What is still kept is lost."""
        for address in list(self._sockets):
            self.forget(address)


class Waker:
    """To be registered with the poller, which takes what has a `fileno`."""

    def __init__(self) -> None:
        self._bell, self._woken = socket.socketpair()
        self._bell.setblocking(False)
        self._woken.setblocking(False)

    def fileno(self) -> int:
        return self._woken.fileno()

    def wake(self) -> None:
        """From any thread; never blocks, and does nothing once it is closed."""
        with suppress(OSError):  # full: the other is about to wake; or closed
            self._bell.send(b"\0")

    def clear(self) -> None:
        """After it has been found ready."""
        self._woken.recv(4096)

    def close(self) -> None:
        self._bell.close()
        self._woken.close()
