"""Pins of the blocks of a prefix, some of which are on their way to the device. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.kv_cache_manager import KVCacheManager


def pin_prefix(
    kv_cache: KVCacheManager, needed: Sequence[Sequence[bytes]], watermark: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int, bytes]]] | None:
    """Pin blocks of a prefix, and take new ones for those that are missing. needed: hashes for each group. Returns
    (group, block) of those that are there, and (group, block, hash) of the new ones; or None, and takes nothing, if too
    few blocks are available."""
    there: list[tuple[int, int]] = []
    new: list[tuple[int, int, bytes]] = []
    for group, (manager, hashes) in enumerate(zip(kv_cache.groups, needed, strict=True)):
        missing = [each for each in hashes if not manager.pool.has(each)]
        found = manager.pin(hashes, watermark)
        if found is None:
            unpin(kv_cache, [*there, *((group, block) for group, block, _ in new)])
            return None
        there += [(group, block) for block in found[0]]
        new += [(group, block, each) for block, each in zip(found[1], missing, strict=True)]
    return there, new


def unpin(kv_cache: KVCacheManager, pinned: Sequence[tuple[int, int]]) -> None:
    """Give up the pins of (group, block)."""
    for group, block in reversed(pinned):
        kv_cache.groups[group].pool.unpin(block)
