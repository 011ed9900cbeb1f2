"""Counts which cached prefixes requests begin with, for new replicas that fetch them. Pure Python."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.wire.parts.kv_fetching import HotPrefix

MIN_TOKENS = 32  # of a prefix that is worth a fetch
MAX_PREFIXES = 128


@dataclass(slots=True)
class _Entry:
    tokens: list[int]
    hashes: list[bytes]
    cache_salt: str
    uses: int = 0


class PrefixCounter:
    """Counts the cached prefixes that requests without images and adapters use."""

    def __init__(self, kv_cache: KVCacheManager, ranks: int = 1):
        self._kv_cache, self._ranks = kv_cache, ranks
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # by the hash of the last block, newest use last

    def observe(self, request: Request) -> None:
        """Count the cached prefix of a request that has got its first token."""
        size = self._kv_cache.pool.block_size
        blocks = request.prefix.num_cached // size
        if blocks * size < MIN_TOKENS or request.prefix.places or request.prefix.extra_keys or not request.generates:
            return
        hashes = request.hashes(blocks, size)
        entry = self._entries.setdefault(hashes[-1], _Entry([], hashes, request.prefix.salt))
        entry.tokens = entry.tokens or request.tokens[: blocks * size]
        entry.uses += 1
        self._entries.move_to_end(hashes[-1])
        if len(self._entries) > MAX_PREFIXES:
            del self._entries[min(self._entries, key=lambda name: self._entries[name].uses)]

    def hottest(self, limit: int) -> list[HotPrefix]:
        """Return the prefixes that are still cached, the most used first, at most `limit` of them."""
        pool, groups = self._kv_cache.pool, self._kv_cache.groups
        cached = [entry for entry in self._entries.values() if pool.has(entry.hashes[-1])]
        found = []
        for entry in sorted(cached, key=lambda entry: -entry.uses)[:limit]:
            sizes = (len(group.needed(entry.hashes)) * group.pool.block_bytes for group in groups)
            found.append(HotPrefix(entry.tokens, entry.cache_salt, entry.uses, sum(sizes) * self._ranks))
        return found
