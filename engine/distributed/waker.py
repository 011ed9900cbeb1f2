"""Ends the wait of a thread that polls ZMQ sockets."""

from __future__ import annotations

import socket
from contextlib import suppress


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
