"""What enters a scheduler for its check of cached KV."""

from __future__ import annotations

from engine.core.door.inputs import KernelWithParts, PartInput
from engine.parts.kv_check.kv_check import KVCheck


class KVCompared(PartInput, frozen=True):
    """All ranks have compared a block with what came from elsewhere."""

    number: int
    layer: int
    """As in BlockCompared."""

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        """If they differ, empty the prefix cache and the tiers below it, as CacheCleared does: what was computed after
        wrong KV is wrong too, wherever it is."""
        if scheduler.parts[KVCheck].compared(self.number, self.layer):
            for cleared in scheduler.parts.cleared:
                cleared()
            scheduler.kv_cache.clear_cache()
