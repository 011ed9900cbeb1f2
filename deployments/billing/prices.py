"""Prices of what a model's requests use."""

from __future__ import annotations

from dataclasses import dataclass

from engine.wire.parts.costs import SequenceCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Money for what a request uses, in the currency of the whole application. What a request has wasted is free."""

    engine_hour: float = 0.0
    """An hour of an engine's steps."""
    kv_gib_hour: float = 0.0
    """An hour of one GiB of KV cache."""
    tier_gib_hour: float = 0.0
    """An hour of one GiB that holds keep in host memory, on disk or in the store."""

    def of(self, cost: SequenceCost) -> float:
        kv = cost.kv_gib_s * self.kv_gib_hour + cost.tier_gib_s * self.tier_gib_hour
        return (cost.compute_s * self.engine_hour + kv) / 3600


FREE = Prices()
