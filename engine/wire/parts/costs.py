"""What requests cost, and what an engine spends its time on."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import msgspec

from engine.wire.part_record import PartRecord


class SequenceCost(PartRecord, frozen=True):
    """What a request has cost the engines so far. Told with its last delta, and with others if they are asked to
    (ReportCost)."""

    part: ClassVar[str] = "costs"

    compute_s: float
    """Its share of the time of all steps; the part of an engine that computed its prompt is included."""
    wasted_s: float
    """Its share for tokens that were computed again, which is not in `compute_s`."""
    kv_gib_s: float
    """Gibibytes of KV cache times the seconds for which it held them. Shared blocks are divided among their holders; of
    a hold, the request that uses it pays for the blocks."""
    tier_gib_s: float = 0.0
    """The same for the blocks of holds in tiers below the KV cache."""

    @classmethod
    def total(cls, costs: Collection[SequenceCost]) -> SequenceCost:
        """Return what several attempts or sequences have cost together."""
        return cls(*(sum(getattr(cost, name) for cost in costs) for name in cls.__struct_fields__))


class CostStats(PartRecord, frozen=True):
    """What one engine has spent since its start."""

    part: ClassVar[str] = "costs"

    seconds: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds by what they were spent on (CostLine)."""
    kv_gib_s: float = 0.0
    """Gibibytes of KV cache times the seconds for which they were used, on all ranks."""


class ReportCost(PartRecord, frozen=True):
    """Asks that every delta tells the cost so far, and not only the last one."""

    part: ClassVar[str] = "costs"
    is_hint: ClassVar[bool] = True
