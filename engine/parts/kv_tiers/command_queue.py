"""Commands to the tiers of all ranks. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.door.outputs import Outputs
from engine.parts.kv_tiers.tier import Tier
from engine.wire.parts.kv_offload import DropBlocks, LoadBlocks, TierCommand


class CommandQueue:
    """Numbers the commands to the tiers, and sends them."""

    def __init__(self) -> None:
        self.out = Outputs()  # the scheduler's
        self._number = 0

    def new_number(self) -> int:
        """Return a number for a command that expects an answer."""
        self._number += 1
        return self._number

    def add(self, command: TierCommand) -> None:
        """Send a command. One that writes to blocks goes once no step in flight writes to them."""
        self.out.post("tiers", command, after_steps=isinstance(command, LoadBlocks))

    def drop(self, tier: Tier, names: Sequence[bytes]) -> None:
        """Delete the files of blocks that have left a tier. Host memory has no files: its slots are reused."""
        if names and tier.name != "host":
            self.add(DropBlocks(list(names), in_store=tier.name == "store"))
