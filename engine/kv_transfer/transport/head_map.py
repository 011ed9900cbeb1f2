"""Maps KV heads and layers to the ranks of two engines: which of them each rank holds, and where another engine has
them. Pure.

The engines can have different numbers of ranks. Heads are distributed as in QKVLinear (engine/model/layers/linear.py):
each rank holds a run of adjacent heads; with more ranks than heads, adjacent ranks hold copies of the same head. The
engines can also have different pipeline stages, each with a run of adjacent layers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadShard:
    """KV heads that rank `rank` of `size` ranks holds, out of the model's `num_kv_heads`.

    Raises ValueError if neither number divides the other; ModelConfig.kv_heads_per_rank raises ConfigError then.
    """

    num_kv_heads: int
    rank: int
    size: int

    def __post_init__(self) -> None:
        if self.num_kv_heads % self.size and self.size % self.num_kv_heads:
            raise ValueError(f"{self.num_kv_heads} KV heads cannot be divided among {self.size} ranks")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be below {self.size}, got {self.rank}")

    @property
    def start(self) -> int:
        return self.rank * self.num_kv_heads // self.size

    @property
    def stop(self) -> int:
        return self.start + max(1, self.num_kv_heads // self.size)

    @property
    def copies(self) -> int:
        """Number of ranks, adjacent ones, that hold the same heads."""
        return max(1, self.size // self.num_kv_heads)


@dataclass(frozen=True, slots=True)
class HeadPart:
    """Heads to read from one rank of the source: [remote_start, remote_start + count) of its heads go to
    [local_start, local_start + count) of the reader's heads."""

    source_rank: int
    remote_start: int
    local_start: int
    count: int


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Layers to read from one stage of the source: [remote_start, remote_start + count) of its layers go to
    [local_start, local_start + count) of the reader's layers. Both are counted within a KV cache group."""

    remote_start: int
    local_start: int
    count: int


def overlap(local: range, remote: range) -> LayerPart | None:
    """Return the layers that both a rank and a rank of the source hold; None if there are none. local, remote: their
    layers, counted within the whole model's KV cache group."""
    start, stop = max(local.start, remote.start), min(local.stop, remote.stop)
    return LayerPart(start - remote.start, start - local.start, stop - start) if start < stop else None


def parts(local: HeadShard, source_size: int) -> list[HeadPart]:
    """Return the parts that cover every head of `local` exactly once, in head order, read from `source_size` ranks.

    If the source has copies of heads, different readers use different copies. With equal sizes, each rank reads
    everything from its counterpart. Raises ValueError like HeadShard.
    """
    found: list[HeadPart] = []
    head = local.start
    while head < local.stop:
        shard = HeadShard(local.num_kv_heads, _holder(local, head, source_size), source_size)
        stop = min(local.stop, shard.stop)
        found.append(HeadPart(shard.rank, head - shard.start, head - local.start, stop - head))
        head = stop
    return found


def _holder(local: HeadShard, head: int, source_size: int) -> int:
    copies = max(1, source_size // local.num_kv_heads)
    first = head * source_size // local.num_kv_heads  # rank of the first copy
    return first + local.rank % local.copies * copies // local.copies
