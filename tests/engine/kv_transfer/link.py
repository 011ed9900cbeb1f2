"""A TCP link that tests can spoil: between a reader and the `tcp` description of a source, or any other address."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import msgspec

from engine.kv_transfer.transport.tcp import decode

CHUNK = 64 << 10
TIMEOUT_S = 20.0


def address_of(description: bytes) -> tuple[str, int]:
    """Host and port of a TCP transport."""
    found = decode(description)
    return found.host, found.port


def with_address(description: bytes, host: str, port: int) -> bytes:
    """The same memory at another address."""
    return msgspec.msgpack.encode(msgspec.structs.replace(decode(description), host=host, port=port))


class Link:
    """Listens at `address`, and passes everything on to `host`:`port` and back.

    All faults are about what comes back from there, and are counted in its bytes over all connections; while it is
    held, what goes there waits too.
    """

    def __init__(self, host: str, port: int):
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._changed = threading.Condition()
        self._sockets: set[socket.socket] = set()
        self._passed = 0
        self._limit: int | None = None  # bytes that may pass in all
        self._flipped: int | None = None  # the byte to be spoilt
        self._rate: float | None = None  # bytes per second
        self._cut = self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    @classmethod
    def to(cls, description: bytes) -> Link:
        """A link to the source that a tcp transport describes so."""
        return cls(*address_of(description))

    def describe(self, description: bytes) -> bytes:
        """The same source, reached over this link."""
        return with_address(description, *self.address)

    def hold(self, after: int = 0) -> None:
        """Let `after` more bytes pass, and then nothing, without closing anything."""
        with self._changed:
            self._limit = self._passed + after

    def release(self) -> None:
        with self._changed:
            self._limit = None
            self._changed.notify_all()

    @property
    def is_held(self) -> bool:
        """All that may pass has passed."""
        return self._passed == self._limit

    def wait_held(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.is_held, TIMEOUT_S), "not so much came"

    def lead_to(self, host: str, port: int) -> None:
        """Where new connections go from now on."""
        self._target = (host, port)

    def corrupt(self, after: int) -> None:
        """Flip a bit of the byte that comes when `after` more have passed."""
        with self._changed:
            self._flipped = self._passed + after

    def throttle(self, bytes_per_s: float | None) -> None:
        with self._changed:
            self._rate = bytes_per_s

    def cut(self) -> None:
        """Close all connections, and take no new ones."""
        with self._changed:
            self._cut = True
            sockets, self._sockets = self._sockets, set()
            self._changed.notify_all()
        for end in sockets:
            shut(end)

    def heal(self) -> None:
        with self._changed:
            self._cut = False

    def close(self) -> None:
        with self._changed:
            self._closed = True
        self.cut()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                continue
            try:
                far = socket.create_connection(self._target, TIMEOUT_S)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            with self._changed:
                if self._cut:
                    near.close()
                    far.close()
                    continue
                self._sockets |= {near, far}
            for pump, start, end in ((self._there, near, far), (self._back, far, near)):
                threading.Thread(target=pump, args=(start, end), daemon=True).start()

    def _there(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while data := near.recv(CHUNK):
                with self._changed:
                    self._changed.wait_for(lambda: self._cut or self._limit is None or self._passed < self._limit)
                    if self._cut:
                        raise OSError("cut")
                far.sendall(data)
        self._end(near, far)

    def _back(self, far: socket.socket, near: socket.socket) -> None:
        with suppress(OSError):
            while data := bytearray(far.recv(CHUNK)):
                while data:
                    near.sendall(self._next(data))
        self._end(near, far)

    def _next(self, data: bytearray) -> bytes:
        """Take from `data` what may pass now, as soon as something may."""
        with self._changed:
            self._changed.wait_for(lambda: self._cut or self._limit is None or self._passed < self._limit)
            if self._cut:
                raise OSError("cut")
            count = len(data) if self._limit is None else min(len(data), self._limit - self._passed)
            if self._rate is not None:
                count = min(count, max(1, int(self._rate / 100)))
                self._changed.wait_for(lambda: self._cut, count / self._rate)
            if self._flipped is not None and 0 <= self._flipped - self._passed < count:
                data[self._flipped - self._passed] ^= 1
                self._flipped = None
            out = bytes(data[:count])
            del data[:count]
            self._passed += count
            self._changed.notify_all()
        return out

    def _end(self, *ends: socket.socket) -> None:
        for end in ends:
            shut(end)
            end.close()
        with self._changed:
            self._sockets -= set(ends)


def shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
