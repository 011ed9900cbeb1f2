"""Prices of what a model's requests use."""

from __future__ import annotations

from dataclasses import dataclass

from engine.wire.messages import SequenceCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Money for what a request uses, in the currency of the whole application. What a request has wasted is free."""

    engine_hour: float = 0.0
    """An hour of an engine's steps."""
    kv_gib_hour: float = 0.0
    """An hour of one GiB of KV cache."""

    def of(self, cost: SequenceCost) -> float:
        return (cost.compute_s * self.engine_hour + cost.kv_gib_s * self.kv_gib_hour) / 3600


FREE = Prices()
