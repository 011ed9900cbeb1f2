"""One tier below the KV cache. Pure Python."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from engine.core.step_cost import LinearCost
from engine.kv_offload.tier_index import TierIndex
from engine.wire.kv_offload import TierStats

REST_S = 30.0  # without a tier that has failed or was late
RATE_MEMORY = 100.0  # loads after which an observation's weight is 1/e


@dataclass(slots=True, eq=False)  # compared by identity
class Tier:
    """One tier, and its statistics."""

    name: str
    indexes: list[TierIndex]
    """One per KV cache group, or one for all."""
    sizes: list[int]
    """Size of a block of each group in its index: in bytes of a rank's disk, or 1 for a slot."""
    unit_bytes: list[int]
    """Bytes on all ranks of each index's unit of size."""
    rests_until: float = float("-inf")
    rests: bool = False
    cost: LinearCost = field(default_factory=lambda: LinearCost(RATE_MEMORY))
    """Of a load by its MiB."""
    moved: Counter[str] = field(default_factory=Counter)
    """Bytes by `read` and `write`, since the start."""
    seconds: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "write": 0.0})
    errors: Counter[str] = field(default_factory=Counter)

    def index(self, group: int) -> TierIndex:
        return self.indexes[group if len(self.indexes) > 1 else 0]

    def has(self, group: int, name: bytes) -> bool:
        return not self.rests and self.index(group).has(name)

    def failed(self, kind: str, count: int, now: float) -> None:
        self.errors[kind] += count
        self.rests, self.rests_until = True, now + REST_S

    def stats(self) -> TierStats:
        return TierStats(
            used_bytes=self._total([index.used for index in self.indexes]),
            total_bytes=self._total([index.capacity for index in self.indexes]),
            blocks=sum(map(len, self.indexes)),
            read_bytes=self.moved["read"],
            write_bytes=self.moved["write"],
            read_s=self.seconds["read"],
            write_s=self.seconds["write"],
            errors=dict(self.errors),
        )

    def _total(self, sizes: list[int]) -> int:
        return sum(size * unit for size, unit in zip(sizes, self.unit_bytes, strict=True))
