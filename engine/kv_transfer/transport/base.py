"""What a transport does: reach the KV cache of another engine's rank, and read blocks of it into the own one.

The reader drives. Nobody writes into another's memory, so a late or dead peer cannot harm blocks that meanwhile belong
to somebody else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine.kv_transfer.transport.head_map import HeadPart

STOPPED = "stopped"
TICK_S = 0.02  # how soon a waiting read notices that it is to stop


class TransportError(Exception):
    """A read did not end well; what it was to write is undefined, and nothing more is written.

    The message is what ReadEnded.error carries: `stopped`, or what is wrong with the link or the peer.
    """


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Of a rank's cache, in bytes: [num_blocks, slabs, heads, head_bytes]. slabs: layers x (K, V). head_bytes: of one
    head's part of a slab of a block, [block_size, head_dim]."""

    num_blocks: int
    slabs: int
    heads: int
    head_bytes: int

    def piece_bytes(self, heads: int) -> int:
        """Of `heads` heads of one block."""
        return self.slabs * heads * self.head_bytes

    def check(self, blocks: list[int], start: int, count: int) -> None:
        """Raise TransportError unless the blocks, and heads [start, start + count), are within."""
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.num_blocks:
            raise TransportError(f"blocks must be below {self.num_blocks}, got {min(blocks)} to {max(blocks)}")
        if not 0 <= start < start + count <= self.heads:
            raise TransportError(f"heads must be within [0, {self.heads}), got [{start}, {start + count})")


@dataclass(frozen=True, slots=True)
class BlockReads:
    """Block `remote[i]` of the source goes to block `local[i]`; of each, the heads of `part`."""

    remote: list[int]
    local: list[int]
    part: HeadPart

    def __post_init__(self) -> None:
        if len(self.remote) != len(self.local):
            raise ValueError(f"{len(self.remote)} blocks cannot be read into {len(self.local)}")

    def check(self, source: Layout, own: Layout) -> int:
        """Returns the bytes of one block's heads. Raises TransportError where the reads do not fit into both."""
        if (source.slabs, source.head_bytes) != (own.slabs, own.head_bytes):
            raise TransportError(f"the source has another layout of blocks: {source}, here {own}")
        source.check(self.remote, self.part.remote_start, self.part.count)
        own.check(self.local, self.part.local_start, self.part.count)
        return own.piece_bytes(self.part.count)


class KVTransport(Protocol):
    """One rank's end. `read` and `drop` may be called from several threads, for several sources."""

    name: str

    def describe(self) -> bytes:
        """How others reach this rank's memory. No two transport objects describe themselves alike, not even one after
        the other at the same address, so this names the memory as it is until `close`."""
        ...

    def read(self, source: bytes, reads: BlockReads, stop: threading.Event) -> int:
        """Return the number of bytes when all is read and has passed the transport's checks.

        source: a description. Raises TransportError: when `stop` is set, when nothing came for the transport's
        `progress_s`, or when the peer is gone, another one, or answers wrongly. Either way nothing is written after the
        end of the call.
        """
        ...

    def drop(self, source: bytes) -> None:
        """Close connections to it and forget it. Reads from it that are under way fail."""
        ...

    def close(self) -> None: ...


class Progress:
    """Ends the waits of a read."""

    def __init__(self, stop: threading.Event, limit_s: float):
        self._stop, self._limit_s = stop, limit_s
        self.made()

    def made(self) -> None:
        """Something came."""
        self._deadline = time.monotonic() + self._limit_s

    def check(self) -> None:
        """To be called every TICK_S or more often. Raises TransportError."""
        if self._stop.is_set():
            raise TransportError(STOPPED)
        if time.monotonic() > self._deadline:
            raise TransportError(f"no progress for {self._limit_s:g} s")


def runs(blocks: list[int], *others: list[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of indices over which all the lists count upwards by one: such blocks lie next to each other, and
    can travel as one piece."""
    first = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or any(ids[i] != ids[i - 1] + 1 for ids in (blocks, *others)):
            yield first, i - first
            first = i
