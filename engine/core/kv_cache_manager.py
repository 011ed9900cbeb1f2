"""What requests hold of the KV cache, and the prefix cache, as the scheduler sees them. Pure Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from engine.core.request import BlockTable, Request
from engine.core.single_type_kv_cache_manager import Below, SingleTypeKVCacheManager, nowhere
from engine.wire.plan import BlockChange

Shorten = Callable[[Request, int, int], int]
"""(request, blocks in a prefix hit, block size) -> leading blocks of the hit that can be used"""

Plan = tuple[SingleTypeKVCacheManager, BlockTable, int]  # a group, the blocks that it has already, and how many more


class KVCacheManager:
    """Allocates blocks for requests, shares them through the prefix cache, and takes them back.

    Layers that keep the same tokens are a KV cache group, with a manager and a pool. All groups share one chain of
    hashes. A request holds blocks in all or in none; a prefix is cached only as far as all have what they need of it.
    """

    def __init__(self, groups: Sequence[SingleTypeKVCacheManager]):
        """groups: one that keeps all tokens comes first, that of recurrent states last."""
        self.groups, self.pool = groups, groups[0].pool
        self.pools = [group.pool for group in groups if group.shows_load]  #: whose used part shows the engine's load

    def match(self, request: Request, shorten: Shorten, below: Below = nowhere) -> int:
        """Return how many leading blocks of a request are cached. Never counts the block of the last token, which is
        always computed. shorten: function that can lower the number. below: tiers whose blocks count too."""
        if not self.pool.enable_prefix_caching or request.prefix.skip_reading:
            return 0
        size = self.pool.block_size
        full = (len(request.tokens) - 1) // size
        count = shorten(request, self.groups[0].longest_hit(request.hashes(full, size), below), size)
        longest = count if len(self.groups) == 1 else -1
        while count != longest:
            longest = count
            for group in self.groups:
                count = shorten(request, group.longest_hit(request.hashes(count, size), below), size)
        return count

    def likely_hit(self, request: Request) -> int:
        """Return about how many leading tokens of a request are cached: a look at the first group, which hashes no
        blocks much behind the first that is missing."""
        if not self.pool.enable_prefix_caching or request.prefix.skip_reading:
            return 0
        size = self.pool.block_size
        full, known, looked = (len(request.tokens) - 1) // size, 0, 0
        while known == looked < full:
            looked = min(full, 2 * looked + 1)
            known = self.groups[0].longest_hit(request.hashes(looked, size))
        return known * size

    def in_flight(self, request: Request, matched: int, running: Sequence[Request]) -> bool:
        """Return whether a running request has to compute what comes after the `matched` blocks, which is then
        cached."""
        reads = self.pool.enable_prefix_caching and not request.prefix.skip_reading
        return reads and any(group.in_flight(request, matched, running) for group in self.groups)

    def reserve(self, request: Request, matched: int, start: int, tokens: int, watermark: int) -> bool:
        """Give a request its `matched` leading blocks from the cache, and new ones up to `tokens` tokens. Returns
        False, and changes nothing, if fewer than `watermark` blocks would be left.

        start: first token that this engine computes; the KV of earlier ones is cached or comes from another engine.
        """
        plans = [(group, *group.plan(request, matched, start, tokens)) for group in self.groups]
        if not have_room(plans, watermark):
            return False
        for group, table, missing in plans:
            group.take(request, table, missing)
        return True

    def add_sequence(self, request: Request) -> None:
        """Send the block tables of a request that just got a slot to the runner."""
        for group in self.groups:
            group.add_sequence(request)

    def grow(self, request: Request, tokens: int) -> bool:
        """Give a running request blocks for `tokens` tokens in all. Returns False if there are too few."""
        for group in self.groups:  # noqa: SIM110 - a generator would take longer than all else, for each request
            if not group.grow(request, tokens):
                return False
        return True

    def cache_blocks(self, request: Request, computed: int) -> None:
        """Enter the full blocks of the first `computed` tokens, as far as these are known, into the prefix cache."""
        for group in self.groups:
            group.cache_blocks(request, computed)

    def invalidate(self, request: Request, first: int = 0) -> None:
        """Mark the blocks of a request from index `first` on as possibly non-finite. Their next users clear them."""
        for group in self.groups:
            group.invalidate(request, first)

    def num_unshared(self, *requests: Request) -> int:
        """Return how many blocks would become free if these requests released theirs."""
        tables = [request.tables for request in requests if request.tables]
        held = (Counter(chain(*[each[group].held for each in tables])) for group in range(len(self.pools)))
        return sum(pool.num_unshared(blocks) for pool, blocks in zip(self.pools, held, strict=True))

    def release(self, request: Request, *, finite: bool = True) -> None:
        """Take a request's blocks back. finite: False if nobody knows yet whether all its newest numbers are finite;
        other requests then clear its newest blocks before they write there."""
        if not finite:
            for group, table in zip(self.groups, request.tables, strict=False):  # none for recurrent states
                known = max(table.num_released, request.finite // self.pool.block_size)
                group.pool.mark_unverified(table.blocks[known:])
        if request.tables:
            for group in self.groups:
                group.free(request)
        request.tables = []
        request.computed = request.capacity = request.finite = 0

    def take_changes(self) -> list[BlockChange]:
        """Return the block table changes since the last call, oldest first in each group."""
        taken: list[BlockChange] = []
        for group in self.groups:
            taken += group.changes
            group.changes.clear()
        return taken

    def clear_cache(self) -> None:
        """Empty the prefix cache."""
        for group in self.groups:
            group.pool.clear_cache()

    def check(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError unless every block is free, cached, or held by these requests."""
        requests = list(holders)
        for group in self.groups:
            group.check(requests)


def have_room(plans: list[Plan], watermark: int) -> bool:
    """Return whether the pools have enough blocks for the plans of all groups."""
    return all(
        group.pool.can_reserve(table.held, missing, watermark if group.shows_load else 0)
        for group, table, missing in plans
    )
