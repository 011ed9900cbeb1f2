"""What engines that share experts tell each other, and who says which go on when one is lost (survivors.py). Imports no
torch."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import zmq

from engine.distributed.cluster_key import ClusterKey
from engine.distributed.sockets import PushSockets


class Wave(msgspec.Struct, frozen=True, tag=True):
    """Asks an engine to take part in a wave of steps. Waves count from 0 in each generation; a wave that is over is
    ignored."""

    number: int
    generation: int = 0


class Lost(msgspec.Struct, frozen=True, tag=True):
    """Says that a rank takes no more steps with this generation of engines."""

    generation: int
    reason: str


class Regroup(msgspec.Struct, frozen=True, tag=True):
    """Tells the engines that go on who they are, after one was lost. Whoever has started their processes sends it."""

    generation: int
    members: list[int]
    """Numbers of their ranks at the start, ascending."""
    reason: str


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Tells the ranks of a generation where the first of them listens."""

    generation: int
    address: str


Message = Wave | Lost | Regroup | Meet


class Roster:
    """Decides which engines go on. It belongs to whoever has started their processes. May be used by any thread."""

    def __init__(self, addresses: Sequence[str], key: ClusterKey | None, ranks_per_engine: int = 1):
        """addresses: where each rank takes messages (Waves.addresses)."""
        self.members = list(range(len(addresses)))  #: numbers of the ranks of engines that have not been lost
        self.generation = 0
        self._addresses, self._width, self._lock = addresses, ranks_per_engine, threading.Lock()
        self._context = zmq.Context()
        self._peers = PushSockets(self._context, key=key)
        for address in addresses:
            self._peers.connect(address)

    def lose(self, engine: int, reason: str) -> bool:
        """Let the other engines go on without this one. Returns False if none is left."""
        with self._lock:
            left = [number for number in self.members if number // self._width != engine]
            if left != self.members:
                told, self.members = self.members, left  # the lost ones too: if they live, they end
                self.generation += 1
                order = msgspec.msgpack.encode(Regroup(self.generation, self.members, reason))
                for member in told:
                    self._peers.send(self._addresses[member], order)
            return bool(self.members)

    def close(self) -> None:
        self._context.destroy(linger=0)
