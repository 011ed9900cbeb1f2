"""What has changed in a prefix cache, for routers that know its blocks by their hashes."""

from __future__ import annotations

from engine.core.block_pool import BlockObserver


class HashChanges(BlockObserver):
    """The hashes that have entered or left a prefix cache since the last call of `take`."""

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] = {}  # by hash: whether it can be matched now

    def __bool__(self) -> bool:
        return bool(self._changes)

    def stored(self, block_hash: bytes) -> None:
        self._changes[block_hash] = True

    def removed(self, block_hash: bytes) -> None:
        self._changes[block_hash] = False

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes added and the hashes removed. A hash both added and removed counts as removed."""
        changes, self._changes = self._changes, {}
        return [h for h, there in changes.items() if there], [h for h, there in changes.items() if not there]
