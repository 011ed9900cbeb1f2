"""KV blocks: who holds which, and which still hold a prefix worth keeping."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Fixed set of KV blocks with reference counts and a prefix cache.

    Every block is in exactly one of three states:
      free    nobody holds it, its content means nothing
      cached  nobody holds it, but its content has a name (hash) and can be matched until it is evicted
      used    held by at least one sequence; named once it is full and computed

    A full pool is an ordinary event (the scheduler preempts), so it is a return value, not an error.
    Prefix cache after vLLM's automatic prefix caching; paging after PagedAttention, arXiv:2309.06180.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._changes: dict[bytes, bool] | None = None  # since they were taken last: can it be matched now?

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `take` could give: free ones, and cached ones by eviction."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def refs(self) -> list[int]:
        """Reference count of every block."""
        return list(self._refs)

    def private(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` have only one holder, so that releasing them gives room."""
        return sum(self._refs[block] == 1 for block in blocks)

    def exclusive(self, tables: Iterable[list[int]]) -> int:
        """How many blocks are held by the owners of these tables and by nobody else."""
        held = Counter(block for blocks in tables for block in blocks)
        return sum(self._refs[block] == count for block, count in held.items())

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Longest run of blocks, from the first hash on, whose content is at hand. Takes no reference."""
        blocks = []
        for name in hashes:
            block = self._by_hash.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def reserve(self, matched: list[int], fresh: int, spare: int = 0) -> list[int] | None:
        """Hold the `matched` blocks and `fresh` new ones, or nothing at all (None) if that would leave fewer
        than `spare` available.

        One call, so that taking the new blocks can never evict the matched ones.
        """
        idle = sum(self._refs[block] == 0 for block in matched)
        if fresh + spare > self.num_available - idle:
            return None
        for block in matched:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1
        taken = self.take(fresh)
        assert taken is not None
        return matched + taken

    def take(self, count: int) -> list[int] | None:
        """`count` blocks at reference count 1, or None if that many cannot be had.

        Evicts cached blocks, least recently used first.
        """
        if count > self.num_available:
            return None
        while len(self._free) < count:
            self._evict()
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def release(self, blocks: list[int]) -> None:
        """Give up one reference to each. Content with a name stays cached."""
        # tail first, so that eviction eats a chain from its end and keeps shared prefixes
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} released more often than taken"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._hash[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, name: bytes) -> int:
        """Name a full, computed block, so that others can match it.

        If another block of that name exists (two sequences computed one prefix at the same time), the
        caller's reference moves there and its own copy is freed. Returns the block to use from now on.
        """
        if not self.enable_prefix_caching:
            return block
        twin = self._by_hash.get(name)
        if twin is None:
            self._by_hash[name] = block
            self._hash[block] = name
            if self._changes is not None:
                self._changes[name] = True
            return block
        if twin != block:
            if self._refs[twin] == 0:
                del self._cached[twin]
            self._refs[twin] += 1
            self.release([block])
        return twin

    def names(self) -> list[bytes]:
        """Of all blocks that can be matched."""
        return list(self._by_hash)

    def track(self, on: bool) -> None:
        """Record from now on which names come and go; or stop it."""
        self._changes = {} if on else None

    @property
    def has_changes(self) -> bool:
        return bool(self._changes)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Names that have come, and that have gone, since the last call. What came and went is among those gone."""
        changes, self._changes = self._changes or {}, {}
        return [n for n, there in changes.items() if there], [n for n, there in changes.items() if not there]

    def clear_cache(self) -> int:
        """Forget all cached content; blocks in use keep theirs. Returns how many were freed."""
        count = len(self._cached)
        while self._cached:
            self._evict()
        return count

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        name = self._hash[block]
        assert name is not None
        del self._by_hash[name]
        self._hash[block] = None
        self._free.append(block)
        if self._changes is not None:
            self._changes[name] = False

    def check(self) -> None:
        """Raise AssertionError unless every block is free, cached or used, exactly once."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block in range(self.num_blocks) if self._refs[block] > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & cached or free & used or cached & used), "a block is in two states"
        assert len(free) + len(cached) + len(used) == self.num_blocks, "a block is lost"
        assert all(self._hash[block] is None for block in free), "a free block has a name"
        assert all(self._hash[block] is not None for block in cached), "a cached block has no name"
        named = {block: name for block, name in enumerate(self._hash) if name is not None}
        assert {name: block for block, name in named.items()} == self._by_hash, "names and blocks disagree"
        assert all(count >= 0 for count in self._refs), "a reference count is negative"
