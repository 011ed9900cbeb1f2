"""Interface of a transport, which reads KV blocks from another engine's rank into this rank's cache.

Only the reader starts transfers. No engine writes into another's memory, so a late or dead peer cannot damage blocks
that have since passed to another request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from engine.kv_transfer.transport.head_map import HeadPart, LayerPart

STOPPED = "stopped"
POLL_INTERVAL_S = 0.02  # after which a waiting read notices, at the latest, that it has to stop


class TransportError(Exception):
    """A failed read: its target blocks are undefined, and nothing more is written to them.

    ReadEnded.error contains its message: `stopped`, or what is wrong with the link or the peer.
    """


class Region(NamedTuple):
    """The part of each block that one read concerns: a range of its slabs, and of its heads in each of them."""

    head: int
    heads: int
    slab: int
    slabs: int


class CacheLayout(msgspec.Struct, frozen=True, array_like=True):
    """Shape of a rank's cache in bytes: [num_blocks, slabs, heads, head_bytes]."""

    num_blocks: int
    slabs: int  #: layers x (K, V)
    heads: int
    head_bytes: int  #: one head in one slab of a block: [block_size, head_dim]

    @property
    def whole(self) -> Region:
        return Region(0, self.heads, 0, self.slabs)

    @property
    def block_bytes(self) -> int:
        return self.piece_bytes(self.whole)

    def piece_bytes(self, region: Region) -> int:
        """Return the size of a region of one block."""
        return region.slabs * region.heads * self.head_bytes

    def check(self, blocks: list[int], region: Region) -> None:
        """Raise TransportError unless all of `blocks`, and the region, exist."""
        start, count, slab, slabs = region
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.num_blocks:
            raise TransportError(f"blocks must be below {self.num_blocks}, got {min(blocks)} to {max(blocks)}")
        if not 0 <= start < start + count <= self.heads:
            raise TransportError(f"heads must be within [0, {self.heads}), got [{start}, {start + count})")
        if not 0 <= slab < slab + slabs <= self.slabs:
            raise TransportError(f"slabs must be within [0, {self.slabs}), got [{slab}, {slab + slabs})")


@dataclass(frozen=True, slots=True)
class BlockReads:
    """Blocks to read: block `remote[i]` of the source goes to local block `local[i]`, limited to the heads of `part`
    and to `layers`."""

    remote: list[int]
    local: list[int]
    part: HeadPart
    layers: LayerPart | None = None
    """None for all, if both sides hold the same layers."""
    slabs_per_layer: int = 2

    def __post_init__(self) -> None:
        if len(self.remote) != len(self.local):
            raise ValueError(f"{len(self.remote)} blocks cannot be read into {len(self.local)} blocks")

    def check(self, source: CacheLayout, own: CacheLayout) -> int:
        """Return the bytes per block to read. Raises TransportError if a block or head does not exist on either
        side."""
        if source.head_bytes != own.head_bytes or (self.layers is None and source.slabs != own.slabs):
            raise TransportError(f"the source's blocks have another layout: {source} instead of {own}")
        source.check(self.remote, self.remote_region(source))
        own.check(self.local, self.local_region(own))
        return own.piece_bytes(self.local_region(own))

    def remote_region(self, source: CacheLayout) -> Region:
        part, layers, size = self.part, self.layers, self.slabs_per_layer
        slabs = (0, source.slabs) if layers is None else (layers.remote_start * size, layers.count * size)
        return Region(part.remote_start, part.count, *slabs)

    def local_region(self, own: CacheLayout) -> Region:
        part, layers, size = self.part, self.layers, self.slabs_per_layer
        slabs = (0, own.slabs) if layers is None else (layers.local_start * size, layers.count * size)
        return Region(part.local_start, part.count, *slabs)


class KVTransport(Protocol):
    """One rank's end of a transport. `read` and `drop` may be called from several threads, for different sources."""

    name: str

    def describe(self) -> bytes:
        """Return the description by which other ranks reach this rank's memory.

        It is unique to this object until `close`: even a later transport at the same address has another description.
        """
        ...

    def read(self, source: bytes, reads: BlockReads, stop: threading.Event) -> int:
        """Read blocks from the rank with the description `source`. Returns the number of bytes.

        Raises TransportError if `stop` is set, if nothing arrives for the transport's `progress_s`, or if the peer is
        gone, was replaced, or answers wrongly. In any case nothing is written after this call has returned.
        """
        ...

    def drop(self, source: bytes) -> None:
        """Close connections to the source and forget it. Reads from it that are in progress fail."""
        ...

    def close(self) -> None: ...


class TransferProgress:
    """Deadline of a read. Every received byte postpones it."""

    def __init__(self, stop: threading.Event, limit_s: float):
        self._stop, self._limit_s = stop, limit_s
        self.made()

    def made(self) -> None:
        """Move the deadline, because something arrived."""
        self._deadline = time.monotonic() + self._limit_s

    def check(self) -> None:
        """Raise TransportError if the read has to end. Call it at least every POLL_INTERVAL_S."""
        if self._stop.is_set():
            raise TransportError(STOPPED)
        if time.monotonic() > self._deadline:
            raise TransportError(f"no progress for {self._limit_s:g} s")


def runs(blocks: list[int], *others: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (first index, count) of each run of indices in which the values of every list rise in steps of one.

    Blocks of a run are adjacent in memory on both sides, and can be read as one piece.
    """
    first = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or any(ids[i] != ids[i - 1] + 1 for ids in (blocks, *others)):
            yield first, i - first
            first = i
