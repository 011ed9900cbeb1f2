"""Commands that wait to be sent to the tiers of all ranks. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.features.tiers.tier import Tier
from engine.wire.kv_offload import DropBlocks, TierCommand


class CommandQueue:
    """Commands to the tiers, oldest first."""

    def __init__(self) -> None:
        self._commands: list[TierCommand] = []
        self._number = 0

    def new_number(self) -> int:
        """Return a number for a command that expects an answer."""
        self._number += 1
        return self._number

    def add(self, command: TierCommand) -> None:
        self._commands.append(command)

    def drop(self, tier: Tier, names: Sequence[bytes]) -> None:
        """Delete the files of blocks that have left a tier. Host memory has no files: its slots are reused."""
        if names and tier.name != "host":
            self.add(DropBlocks(list(names), in_store=tier.name == "store"))

    def take(self) -> list[TierCommand]:
        """Return the commands added since the last call."""
        commands, self._commands = self._commands, []
        return commands
