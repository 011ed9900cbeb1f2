"""KV heads that each rank holds, and where the ranks of another engine find them. Pure.

The two engines may have different numbers of ranks. Heads are dealt out as by QKVLinear
(engine/model/layers/linear.py): each rank holds a run of neighbouring heads; with more ranks than heads, neighbouring
ranks hold copies of the same one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The KV heads that rank `rank` of `size` ranks holds, of `num_kv_heads` in the model.

    Raises ValueError where ModelConfig.kv_heads_per_rank raises ConfigError: heads and ranks must divide.
    """

    num_kv_heads: int
    rank: int
    size: int

    def __post_init__(self) -> None:
        if self.num_kv_heads % self.size and self.size % self.num_kv_heads:
            raise ValueError(f"{self.num_kv_heads} KV heads cannot be dealt out to {self.size} ranks")
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
        """Ranks that hold the same heads, which are neighbours."""
        return max(1, self.size // self.num_kv_heads)


@dataclass(frozen=True, slots=True)
class HeadPart:
    """Heads to read from one rank of the source: [remote_start, remote_start + count) of the heads that it holds, to
    [local_start, local_start + count) of the reader's own."""

    source_rank: int
    remote_start: int
    local_start: int
    count: int


def parts(local: HeadShard, source_size: int) -> list[HeadPart]:
    """Every head of `local`, each exactly once, from an engine of `source_size` ranks, in the order of the heads.

    Copies are read evenly: each copy of the reader reads from another copy of the source where there are as many. With
    equal sizes, each rank reads all from its own counterpart. Raises ValueError as HeadShard does.
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
    first = head * source_size // local.num_kv_heads  # with copies: of the first one
    return first + local.rank % local.copies * copies // local.copies
