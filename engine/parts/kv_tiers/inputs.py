"""What enters a scheduler for its tiers."""

from __future__ import annotations

from engine.core.door.inputs import KernelWithParts, PartInput
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.wire.parts.kv_offload import StoreListing, TierAnswer


class TiersAnswered(PartInput, frozen=True):
    answers: list[TierAnswer | StoreListing]

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        for answer in self.answers:
            scheduler.parts[KVOffloading].answered(answer, now)
