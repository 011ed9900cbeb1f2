"""What engines that share experts tell each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec
import zmq

from engine.distributed.sockets import PullSocket, PushSockets, Waker
from engine.distributed.tp_group import ConnectedGroup

NAME = "waves"  # name of the socket in metrics


class Wave(msgspec.Struct, frozen=True, tag=True):
    """Asks an engine to take part in a wave of steps. Waves count from 0; one that is over is ignored."""

    number: int


class Lost(msgspec.Struct, frozen=True, tag=True):
    """Says that a rank takes no more steps."""

    reason: str


Message = Wave | Lost


class Waves:
    """Messages by which an engine that has something to compute wakes the others and its own other ranks, and by which
    engines learn that one of them is lost."""

    def __init__(self, engines: ConnectedGroup):
        """Every rank of every engine has to create its end at the same time."""
        self._context = zmq.Context()
        self._inbox: PullSocket[Message] = PullSocket(self._context, engines.host, Message, name=NAME, key=engines.key)
        self._encode = msgspec.msgpack.Encoder().encode
        self._end, self._closing = Waker(), False
        self._listener: threading.Thread | None = None
        addresses = engines.exchange(self._inbox.address)
        self._others = [address for rank, address in enumerate(addresses) if rank != engines.rank]
        self._peers = PushSockets(self._context, key=engines.key)
        for address in self._others:
            self._peers.connect(address)

    def tell(self, message: Message) -> None:
        """Send a message to all other ranks. Called by one thread."""
        encoded = self._encode(message)
        with suppress(zmq.ZMQError):  # the engine ends, and its sockets are closed
            for address in self._others:
                self._peers.send(address, encoded)

    def listen(self, call: Callable[[Message], None]) -> None:
        """Call a function, in another thread, for every message."""

        poller = zmq.Poller()
        poller.register(self._inbox.socket, zmq.POLLIN)
        poller.register(self._end, zmq.POLLIN)

        def receive() -> None:
            while not self._closing:
                poller.poll()
                for message in self._inbox.messages():
                    call(message)

        self._listener = threading.Thread(target=receive, name="waves", daemon=True)
        self._listener.start()

    def close(self) -> None:
        self._closing = True
        self._end.wake()
        if self._listener is not None:
            self._listener.join()
        self._end.close()
        self._context.destroy(linger=0)
