"""What ranks compare of cached KV, and what an engine tells of it."""

from __future__ import annotations

from typing import ClassVar

from engine.wire.part_record import PartRecord

EQUAL = -1  # for a layer


class BlockPair(PartRecord, frozen=True, array_like=True):
    """Two blocks that must be equal once the step is computed: all ranks compare their parts."""

    part: ClassVar[str] = "kv_check"

    number: int
    """Counts from 1; answers name it."""
    computed: int
    """The block that the step computes."""
    cached: int
    """The block that came from elsewhere."""

    def decided(self) -> tuple[int, ...]:
        return self.number, self.computed, self.cached


class BlockCompared(PartRecord, frozen=True, array_like=True):
    """What one rank has found."""

    part: ClassVar[str] = "kv_check"

    number: int
    layer: int
    """The first layer that differs; EQUAL if none does."""


class KVCheckStats(PartRecord, frozen=True):
    """Blocks that one engine has computed again since its start."""

    part: ClassVar[str] = "kv_check"

    checks: dict[str, dict[str, int]]
    """Numbers of blocks by where they came from (`host`, `disk`, `store`, `handoff`, `fetch`), and then by result:
    `equal` or `different`."""
    tokens: int
    """Tokens computed for that."""
