"""What enters a scheduler for its holds."""

from __future__ import annotations

from typing import Any

from engine.core.door.inputs import KernelWithParts, PartInput
from engine.parts.holds.holds import Holds


class HoldsReleased(PartInput, frozen=True):
    """Ends the holds of this name. client: whose holds end; None for all clients."""

    name: str
    client: str | None

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        if (holds := scheduler.parts.get(Holds)) is not None:
            holds.release(self.name, self.client)


class HoldsGiven(PartInput, frozen=True):
    """Up to `limit` holds leave for other engines. `apply` returns them."""

    limit: int

    def apply(self, scheduler: KernelWithParts, now: float) -> Any:
        return [] if (holds := scheduler.parts.get(Holds)) is None else holds.give(self.limit, now)
