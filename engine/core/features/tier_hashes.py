"""Hashes of the blocks in tiers below the KV cache, for routers. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.core.block_pool import BlockPool
from engine.core.features.tier import Tier


class NoHashes:
    """Stand-in for TierHashes in an engine without tiers. Has the methods that a publisher calls."""

    def track(self, enabled: bool) -> None:
        pass

    def all(self) -> list[bytes]:
        return []

    def gone(self, evicted: list[bytes]) -> list[bytes]:
        return evicted


class TierHashes:
    """Hashes of the first KV cache group's blocks that are in some tier, as far as they are known. Of a block left by
    an earlier start, only the name is known until the block is used."""

    def __init__(self, pool: BlockPool, tiers: Sequence[Tier], name_of: Callable[[int, bytes], bytes]):
        """pool: block pool of the first KV cache group."""
        self._pool, self._tiers, self._name_of = pool, tiers, name_of
        self._hashes: dict[bytes, bytes] = {}  # by name
        self._gone: list[bytes] | None = None  # since the last call of `gone`

    def track(self, enabled: bool) -> None:
        """Start or stop recording which blocks leave the tiers."""
        self._gone = [] if enabled else None

    def all(self) -> list[bytes]:
        return list(self._hashes.values())

    def add(self, group: int, name: bytes, block_hash: bytes) -> None:
        if not group:
            self._hashes[name] = block_hash

    def gone(self, evicted: list[bytes]) -> list[bytes]:
        """Return the hashes of blocks that are neither on the device nor in a tier any more. Considers the hashes
        `evicted` from the device, and those that have left the tiers since the last call."""
        left, self._gone = self._gone or [], []
        return [
            each
            for each in dict.fromkeys([*evicted, *left])
            if not self._pool.has(each) and self._name_of(0, each) not in self._hashes
        ]

    def update(self) -> None:
        """Forget the blocks that have left all tiers."""
        for index in (index for tier in self._tiers for index in tier.indexes):
            removed, index.removed = index.removed, []
            for name in removed:
                if name in self._hashes and not any(tier.index(0).knows(name) for tier in self._tiers):
                    block_hash = self._hashes.pop(name)
                    if self._gone is not None:
                        self._gone.append(block_hash)
