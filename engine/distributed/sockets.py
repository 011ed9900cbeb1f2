"""ZMQ sockets: one that receives from many senders, some that send to many receivers, and a waker for pollers."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from engine.distributed.cluster_key import ClusterKey
from engine.distributed.handshake_monitor import HandshakeMonitor
from engine.distributed.refusals import REFUSALS, Reason

FORGET_S = 60.0  # without a message to a receiver after which its socket counts as unused

Message = TypeVar("Message")


class PullSocket(Generic[Message]):
    """A bound PULL socket for messages of one type. Any other bytes are counted as refused and dropped."""

    def __init__(self, context: zmq.Context[Any], host: str, message: Any, *, name: str, key: ClusterKey | None = None):
        """host: an IP address of this machine.
        message: type of the messages, possibly a union.
        name: name of the socket in metrics.
        key: cluster key that senders must have; None admits any sender."""
        self.name = name
        self.socket: Any = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        if ":" in host:
            self.socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        if key is not None:
            key.guard_listener(self.socket)
        self._monitor = HandshakeMonitor(context, self.socket, name)
        self.address = f"tcp://{host}:{self.socket.bind_to_random_port(f'tcp://{host}')}"
        self._decode = msgspec.msgpack.Decoder(message).decode

    def messages(self) -> Iterator[Message]:
        """Yield all messages that have arrived, without waiting."""
        self._monitor.look()
        while True:
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._read(data)
            if message is not None:
                yield message

    async def serve(self, handle: Callable[[Message], None]) -> None:
        """Call `handle` for every message until cancelled. Requires a zmq.asyncio context."""
        watching = asyncio.create_task(self._monitor.watch())
        try:
            while True:
                message = self._read(await self.socket.recv())
                if message is not None:
                    try:
                        handle(message)
                    except Exception as error:  # noqa: BLE001 - it is logged
                        self.refuse("unexpected", f"{type(message).__name__}: {error!r}")
        finally:
            watching.cancel()

    def refuse(self, reason: Reason, detail: object) -> None:
        REFUSALS.add(self.name, reason, detail)

    def _read(self, data: bytes) -> Message | None:
        try:
            message: Message = self._decode(data)
        except Exception as error:  # noqa: BLE001 - any bytes may come, and decoders raise more than msgspec's errors
            self.refuse("malformed", repr(error))
            return None
        return message


class PushSockets:
    """PUSH sockets, one per receiver, opened when first needed. For use in one thread.

    Sending never blocks. Messages that a receiver has not accepted are kept until its socket is forgotten or closed.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        options: Mapping[int, int] | None = None,
        key: ClusterKey | None = None,
    ):
        """options: ZMQ socket options. zmq.SNDHWM limits the messages kept for a receiver; further ones are dropped.
        key: cluster key that receivers must have; None if they have none."""
        self._context, self._key = context, key
        self._options = {zmq.LINGER: 0, zmq.SNDHWM: 0, **(options or {})}
        self._sockets: dict[str, tuple[zmq.Socket[bytes], float]] = {}  # address -> (socket, time of last use)

    def connect(self, address: str) -> None:
        """Open the socket of a receiver if there is none. Raises zmq.ZMQError for an invalid address."""
        if address in self._sockets:
            return
        socket = self._context.socket(zmq.PUSH)
        for option, value in self._options.items():
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.IPV6, "[" in address)
        if self._key is not None:
            self._key.guard_connector(socket)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close()
            raise
        self._sockets[address] = (socket, time.monotonic())

    def send(self, address: str, message: bytes) -> bool:
        """Send a message. Returns False, and drops it, if too many are kept for the receiver. Raises like `connect`."""
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
        """Close all sockets. Messages still kept are lost."""
        for address in list(self._sockets):
            self.forget(address)


class Waker:
    """Ends the wait of the poller it is registered with. Pollers take any object that has a `fileno`."""

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
