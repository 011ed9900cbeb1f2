"""Reference counts of the KV blocks, and the prefix cache over them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from engine.core.request import Request


class BlockHolder(Protocol):
    """Something with references to blocks: a request, or what a part keeps."""

    of: dict[str, Any]
    """What parts keep of it, by their names."""


class BlockObserver:
    """Sees how the references and the prefix cache of a pool change. A subclass overrides the methods for the changes
    that it records."""

    def taken(self, blocks: Sequence[int], holder: BlockHolder | None) -> None:
        """Record that a holder has one more reference to each of these blocks. holder: None for a copy to or from a
        tier or another engine."""

    def returned(self, blocks: Sequence[int], holder: BlockHolder | None) -> None:
        """Record that a holder has one reference less to each of these blocks."""

    def describe(self, request: Request, first: int, end: int) -> None:
        """Record that the blocks [first, end) of a request hold its tokens. Called before they enter the prefix
        cache."""

    def stored(self, block_hash: bytes) -> None:
        """Record that a block has entered the prefix cache."""

    def removed(self, block_hash: bytes) -> None:
        """Record that a block has left the prefix cache."""

    def cleared(self) -> None:
        """Record that the prefix cache has been emptied. `removed` has already been called for each block."""


class BlockPool:
    """A fixed set of KV blocks with reference counts and a prefix cache.

    Every block is in exactly one of three states:
      free    no sequence holds it, its content means nothing
      cached  no sequence holds it, but its content has a hash and can be matched until it is evicted
      used    held by at least one sequence; it gets a hash once it is full and computed

    A full pool is ordinary (the scheduler then preempts), so methods report it by their result, not by an error.
    Prefix cache after vLLM's automatic prefix caching; paging after PagedAttention, arXiv:2309.06180.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        null_block: bool = False,
        block_bytes: int = 0,
    ):
        """null_block: whether to reserve block 0, besides the `num_blocks`, as a block of zeros that is never handed
        out. Block tables contain it at positions that are never read. block_bytes: bytes of a block on one rank, for
        statistics."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.enable_prefix_caching = enable_prefix_caching
        self._first = int(null_block)
        num_blocks += self._first
        self._free = list(range(num_blocks - 1, self._first - 1, -1))
        self._ref_counts = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._invalid: set[int] = set()
        self._unverified: set[int] = set()
        #: References that are not of requests, by block.
        self.pinned: Counter[int] = Counter()
        self.observers: list[BlockObserver] = []

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
        """Number of blocks that `allocate` could return: free blocks, and cached blocks, which it would evict."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def ref_counts(self) -> list[int]:
        """Reference count of every block."""
        return list(self._ref_counts)

    def num_unshared(self, references: Mapping[int, int]) -> int:
        """Return how many blocks have only these references, given by block. Releasing them all frees that many."""
        return sum(self._ref_counts[block] == count for block, count in references.items())

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the longest run of blocks, from the first hash on, that are cached or in use. Takes no references."""
        blocks = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def has(self, block_hash: bytes) -> bool:
        """Return whether the prefix cache has a block of this hash."""
        return block_hash in self._by_hash

    def reserve(
        self, matched: list[int], num_new: int, watermark: int = 0, holder: BlockHolder | None = None
    ) -> list[int] | None:
        """Take references to the `matched` blocks and to `num_new` new ones. Returns None, and takes nothing, if fewer
        than `watermark` blocks would stay available. holder: who has the references, for the observers.

        One call does both, so that allocating new blocks can never evict the matched ones.
        """
        if not self.can_reserve(matched, num_new, watermark):
            return None
        self._refer(matched, holder)
        blocks = self.allocate(num_new, holder)
        assert blocks is not None
        return matched + blocks

    def can_reserve(self, matched: list[int], num_new: int, watermark: int = 0) -> bool:
        """Return whether `reserve` would succeed."""
        idle = sum(self._ref_counts[block] == 0 for block in matched)
        return num_new + watermark <= self.num_available - idle

    def allocate(self, count: int, holder: BlockHolder | None = None) -> list[int] | None:
        """Return `count` blocks with a reference count of 1, or None if there are not that many.

        Evicts cached blocks, least recently used first. holder: as for `reserve`.
        """
        if count > self.num_available:
            return None
        while len(self._free) < count:
            self._evict()
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        for observer in self.observers:
            observer.taken(blocks, holder)
        return blocks

    def _refer(self, blocks: list[int], holder: BlockHolder | None) -> None:
        """Take a reference to each of these blocks, which are cached or used."""
        for block in blocks:
            references = self._ref_counts[block]
            if references == 0:
                del self._cached[block]
            self._ref_counts[block] = references + 1
        for observer in self.observers:
            observer.taken(blocks, holder)

    def release(self, blocks: list[int], holder: BlockHolder | None = None) -> None:
        """Drop one reference to each block. A block that has a hash stays cached. holder: whose references they
        are, for the observers."""
        # tail first, so that eviction shortens a chain from its end and keeps shared prefixes
        for block in reversed(blocks):
            references = self._ref_counts[block]
            assert references > 0, f"block {block} released more often than allocated"
            self._ref_counts[block] = references - 1
            if references == 1:
                if self._hash[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None
        for observer in self.observers:
            observer.returned(blocks, holder)

    def cache_block(self, block: int, block_hash: bytes, holder: BlockHolder | None = None) -> int:
        """Enter a full, computed block into the prefix cache, and return the block to use from now on.

        Two sequences can compute one prefix at the same time. If the cache already has a block of this hash, the
        caller's reference moves to that block, and the caller's copy is freed. holder: as for `release`.
        """
        if not self.enable_prefix_caching:
            return block
        duplicate = self._by_hash.get(block_hash)
        if duplicate is None:
            self._by_hash[block_hash] = block
            self._hash[block] = block_hash
            self._invalid.discard(block)
            self._unverified.discard(block)
            for observer in self.observers:
                observer.stored(block_hash)
            return block
        if duplicate != block:
            self._refer([duplicate], holder)
            self.release([block], holder)
        return duplicate

    def block_hashes(self) -> list[bytes]:
        """Hashes of all blocks that can be matched."""
        return list(self._by_hash)

    def describe(self, request: Request, first: int, end: int) -> None:
        """Tell the observers that the blocks [first, end) of a request, which are about to be cached, hold its
        tokens."""
        for observer in self.observers:
            observer.describe(request, first, end)

    def clear_cache(self) -> None:
        """Empty the prefix cache: no current block can be matched again. Blocks in use stay valid for their holders."""
        while self._cached:
            self._evict()
        for block in list(self._by_hash.values()):
            self._forget(block)
        for observer in self.observers:
            observer.cleared()

    def invalidate(self, blocks: list[int]) -> None:
        """Remove from the prefix cache the blocks that only the caller holds: their numbers may be non-finite.
        `take_invalid` reports them to their next owner, who must clear them."""
        for block in blocks:
            if self._ref_counts[block] == 1:
                self._invalid.add(block)
                if self._hash[block] is not None:
                    self._forget(block)

    def mark_unverified(self, blocks: Iterable[int]) -> None:
        """Record that nobody knows yet whether the numbers in these blocks are finite. They can still be matched, since
        a request that reads non-finite numbers fails, but `take_invalid` reports them too."""
        self._unverified.update(blocks)

    def take_invalid(self, blocks: list[int]) -> list[int]:
        """Return which of `blocks` may hold non-finite numbers, and mark them valid: the caller, their new owner,
        clears those that it writes."""
        found = [block for block in blocks if block in self._invalid or block in self._unverified]
        self._invalid.difference_update(found)
        self._unverified.difference_update(found)
        return found

    def discard(self, block_hash: bytes) -> None:
        """Free the cached block of this hash, if it exists and no request holds it."""
        block = self._by_hash.get(block_hash)
        if block is not None and self._ref_counts[block] == 0:
            del self._cached[block]
            self._forget(block)
            self._free.append(block)

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        self._free.append(block)

    def _forget(self, block: int) -> None:
        block_hash = self._hash[block]
        assert block_hash is not None
        del self._by_hash[block_hash]
        self._hash[block] = None
        for observer in self.observers:
            observer.removed(block_hash)

    def check(self, references: Counter[int] | None = None) -> None:
        """Raise AssertionError unless every block is in exactly one state: free, cached or used. references: those that
        are no pins, by block; None if they are not known."""
        used = [block for block, count in enumerate(self._ref_counts) if count]
        found = sorted([*self._free, *self._cached, *used])
        assert found == [*range(self._first, self._first + self.num_blocks)], "a block is lost, or in two states"
        assert {self._hash[block] for block in self._free} <= {None}, "a free block has a hash"
        assert None not in {self._hash[block] for block in self._cached}, "a cached block has no hash"
        assert self._by_hash == {h: block for block, h in enumerate(self._hash) if h is not None}, "hashes disagree"
        assert all(self._hash[block] is None for block in self._invalid), "an invalid block can be matched"
        assert min(self._ref_counts) >= 0, "a reference count is negative"
        counts = Counter(dict(enumerate(self._ref_counts)))
        assert references is None or references + self.pinned == +counts, "blocks are lost"
