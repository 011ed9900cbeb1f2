"""Prefixes in all KV cache groups: how much of one is there, and pins of its blocks, some of which are on their way to
the device. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.block_pool import BlockHolder, BlockPool
from engine.core.kv_cache_manager import KVCacheManager, have_room
from engine.core.request import BlockTable, Request
from engine.core.single_type_kv_cache_manager import Below, nowhere


def longest_prefix(kv_cache: KVCacheManager, hashes: Sequence[bytes], below: Below = nowhere) -> int:
    """Return the length of the longest prefix for which all KV cache groups have the blocks that a sequence needs to
    continue. below: tiers whose blocks count too."""
    count = len(hashes)
    while True:
        longest = count
        for group in kv_cache.groups:
            count = group.longest_hit(hashes[:count], below)
        if count == longest:
            return count


def pin_prefix(
    kv_cache: KVCacheManager, needed: Sequence[Sequence[bytes]], watermark: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int, bytes]]] | None:
    """Pin blocks of a prefix, and take new ones for those that are missing. needed: hashes for each group. Returns
    (group, block) of those that are there, and (group, block, hash) of the new ones; or None, and takes nothing, if too
    few blocks are available. watermark: blocks of each group that must stay available."""
    there: list[tuple[int, int]] = []
    new: list[tuple[int, int, bytes]] = []
    for group, (manager, hashes) in enumerate(zip(kv_cache.groups, needed, strict=True)):
        pool = manager.pool
        known = [block for each in hashes for block in pool.match([each])]
        missing = [each for each in hashes if not pool.has(each)]
        if not have_room([(manager, BlockTable(known), len(missing))], watermark):
            unpin_prefix(kv_cache, [*there, *((group, block) for group, block, _ in new)])
            return None
        pinned = pin(pool, known, len(missing))
        assert pinned is not None
        there += [(group, block) for block in known]
        new += [(group, block, each) for block, each in zip(pinned[len(known) :], missing, strict=True)]
    return there, new


def unpin_prefix(kv_cache: KVCacheManager, pinned: Sequence[tuple[int, int]]) -> None:
    """Give up the pins of (group, block)."""
    for group, block in reversed(pinned):
        unpin(kv_cache.groups[group].pool, block)


def pin(pool: BlockPool, matched: list[int], num_new: int = 0, holder: BlockHolder | None = None) -> list[int] | None:
    """Take references that are not of a request, with the arguments and result of `BlockPool.reserve`."""
    blocks = pool.reserve(matched, num_new, holder=holder)
    pool.pinned.update(blocks or ())
    return blocks


def unpin(pool: BlockPool, block: int, loaded_hash: bytes | None = None, holder: BlockHolder | None = None) -> None:
    """Release a pinned block. loaded_hash: hash under which to cache the block, if a copy has filled it."""
    pool.pinned[block] -= 1
    if not pool.pinned[block]:
        del pool.pinned[block]
    pool.release([block if loaded_hash is None else pool.cache_block(block, loaded_hash, holder)], holder)


def fits(
    kv_cache: KVCacheManager, request: Request, matched: int, start: int, tokens: int, watermark: int
) -> bool:  # fmt: skip
    """Return whether `KVCacheManager.reserve` would succeed."""
    return have_room([(group, *group.plan(request, matched, start, tokens)) for group in kv_cache.groups], watermark)
