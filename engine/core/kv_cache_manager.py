"""Block tables of the requests, and the prefix cache. Pure Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from engine.core.block_pool import BlockPool
from engine.core.request import BlockTable, Request
from engine.wire.handoff import HeldBlocks
from engine.wire.plan import BlockChange, StateRestore, StateSave

Shorten = Callable[[Request, int, int], int]
"""(request, blocks in a prefix hit, block size) -> leading blocks of the hit that can be used"""
Below = Callable[[int, bytes], bool]
"""(KV cache group, hash) -> whether a tier below has the block"""


class StateChanges(NamedTuple):
    """Snapshots of recurrent states that a step restores and saves."""

    restored: list[StateRestore]
    saved: list[StateSave]


NO_STATES = StateChanges([], [])


def nowhere(group: int, block_hash: bytes) -> bool:
    """Return False: no tier has the block if there are no tiers."""
    return False


class KVCacheManager:
    """Allocates blocks of one pool for requests, shares them through the prefix cache, and takes them back.

    All layers share its block tables if they keep the same tokens. Otherwise each KV cache group has a manager, behind
    a KVCacheCoordinator with the same methods (parts/kv_groups). Changes to the block tables of running requests are
    collected until the next step's plan carries them to the ranks.
    """

    #: vLLM's name of what the layers of the group are.
    kind = "full_attention"
    #: Newest tokens whose KV is kept; None keeps all.
    window: int | None = None

    def __init__(self, pool: BlockPool, group: int = 0):
        self.pool, self._group = pool, group
        self._changes: list[BlockChange] = []

    @property
    def groups(self) -> Sequence[KVCacheManager]:
        """The managers of all KV cache groups."""
        return [self]

    @property
    def pools(self) -> list[BlockPool]:
        return [self.pool]

    @property
    def window_blocks(self) -> int:
        """Number of blocks at the end of a prefix that suffice to continue after it; 0 if all blocks are needed."""
        return 0

    def match(self, request: Request, shorten: Shorten, below: Below = nowhere) -> int:
        """Return how many leading blocks of a request are cached. Never counts the block of the last token, which is
        always computed. shorten: function that can lower the number. below: tiers whose blocks count too."""
        if not self._reads_cache(request):
            return 0
        size = self.pool.block_size
        full = (len(request.tokens) - 1) // size
        return shorten(request, self.longest_hit(request.hashes(full, size), below), size)

    def longest_hit(self, hashes: Sequence[bytes], below: Below = nowhere) -> int:
        """Return how many leading hashes of this list the prefix cache has, up to the first gap."""
        count = len(self.pool.match(hashes))
        while count < len(hashes) and self._has(hashes[count], below):
            count += 1
        return count

    def least(self, max_model_len: int) -> int:
        """Return how many blocks this group needs for one request of the maximum length."""
        return self.pool.blocks_for(max_model_len)

    def needed(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Return which of these hashes belong to blocks that a sequence needs to continue after the last block."""
        return hashes

    def worth_storing(self, request: Request) -> Sequence[bytes]:
        """Return the hashes of a request's blocks that this group has and later requests may need."""
        size = self.pool.block_size
        known = min(request.computed, len(request.tokens)) // size
        return [each for each in request.hashes(known, size) if self.pool.has(each)]

    def in_flight(self, request: Request, matched: int, running: Iterable[Request]) -> bool:
        """Return whether a running request is computing the block after the `matched` ones, which will then be cached a
        step later."""
        count, size = matched + 1, self.pool.block_size
        if not self._reads_cache(request) or count * size >= len(request.tokens):
            return False
        wanted = request.hashes(count, size)[-1]
        return any(
            other.tables[self._group].num_cached < count <= min(other.computed, len(other.tokens)) // size
            and other.hashes(count, size)[-1] == wanted
            for other in running
        )

    def reserve(self, request: Request, matched: int, start: int, tokens: int, watermark: int) -> bool:
        """Give a request its `matched` leading blocks from the cache, and new ones up to `tokens` tokens. Returns
        False, and changes nothing, if fewer than `watermark` blocks would be left.

        start: first token that this engine computes; the KV of earlier ones is cached or comes from another engine.
        """
        plans = [(group, *group.plan(request, matched, start, tokens)) for group in self.groups]
        if not all(group.can_reserve(table, missing, watermark) for group, table, missing in plans):
            return False
        for group, table, missing in plans:
            group.take(request, table, missing)
        return True

    def fits(self, request: Request, matched: int, start: int, tokens: int, watermark: int) -> bool:
        """Return whether `reserve` would succeed."""
        plans = [(group, *group.plan(request, matched, start, tokens)) for group in self.groups]
        return all(group.can_reserve(table, missing, watermark) for group, table, missing in plans)

    def can_reserve(self, table: BlockTable, missing: int, watermark: int) -> bool:
        """Return whether the pool has enough blocks for a `plan`."""
        return self.pool.can_reserve(table.held, missing, watermark)

    def plan(self, request: Request, matched: int, start: int, tokens: int) -> tuple[BlockTable, int]:
        """Return the block table of a request with its cached blocks, and how many new blocks it needs after them."""
        blocks = self.pool.match(request.hashes(matched, self.pool.block_size))
        return BlockTable(blocks, matched), self.pool.blocks_for(tokens) - matched

    def take(self, request: Request, table: BlockTable, missing: int) -> None:
        """Carry out a `plan` for which `can_reserve` is true."""
        blocks = self.pool.reserve(table.held, missing, holder=request)
        assert blocks is not None
        table.blocks[table.num_released :] = blocks
        request.tables.append(table)
        self._count(request)

    def add_sequence(self, request: Request) -> None:
        """Send the block table of a request that just got a slot to the runner."""
        self._send(request, 0)

    def received(self, request: Request) -> int:
        """Return how many tokens count as computed once another engine has sent the KV of all known tokens."""
        return len(request.tokens)

    def grow(self, request: Request, tokens: int) -> bool:
        """Give a running request blocks for `tokens` tokens in all. Returns False if there are too few."""
        blocks = request.tables[self._group].blocks
        missing = self.pool.blocks_for(tokens) - len(blocks)
        if missing <= 0:
            return True
        new = self.pool.allocate(missing, request)
        if new is None:
            return False
        blocks += new
        self._count(request)
        self._send(request, len(blocks) - missing)
        return True

    def cache_blocks(self, request: Request, computed: int) -> None:
        """Enter the full blocks of the first `computed` tokens into the prefix cache, as far as the tokens are
        known."""
        table = request.tables[self._group]
        if computed < table.next_full or not self.pool.enable_prefix_caching:
            return
        first, size = table.num_cached, self.pool.block_size
        full = max(first, min(computed, len(request.tokens)) // size)
        hashes = request.hashes(full, size)
        self.pool.describe(request, first, full)
        for index in range(first, full):
            own = table.blocks[index]
            block = self.pool.cache_block(own, hashes[index], request)
            if block != own:  # another request computed the same prefix: share its copy
                table.blocks[index] = block
                if request.slot >= 0:
                    self._changes.append(BlockChange(request.slot, index, [block], group=self._group))
        table.num_cached, table.next_full = full, (full + 1) * size

    def invalidate(self, request: Request, first: int = 0) -> None:
        """Mark the blocks of a request from index `first` on as possibly non-finite: they are cleared before their next
        use."""
        table = request.tables[self._group]
        self.pool.invalidate(table.blocks[max(first, table.num_released) :])

    def hold(self, request: Request) -> list[HeldBlocks]:
        """Return the blocks that another engine needs to continue after the known tokens, one entry for each KV cache
        group. All known tokens must be computed. Returns an empty list if no engine could continue from these
        blocks."""
        table = request.tables[self._group]
        last = self.pool.blocks_for(len(request.tokens))
        return [HeldBlocks(table.num_released, table.blocks[table.num_released : last])]

    def num_unshared(self, *requests: Request) -> int:
        """Return how many blocks would become free if these requests released theirs."""
        tables = [request.tables[self._group].held for request in requests if request.tables]
        return self.pool.num_unshared(Counter(chain(*tables)))

    def release(self, request: Request) -> None:
        if request.tables:
            self.give_back(request)
        request.tables = []
        request.computed = request.capacity = request.finite = 0

    def doubt(self, request: Request) -> None:
        """Mark the blocks of a request that stops before it is known whether all its numbers are finite. Other requests
        clear those blocks before they write there."""
        for manager, table in zip(self.groups, request.tables, strict=False):  # none for recurrent states
            manager.pool.doubt(table.blocks[max(table.num_released, request.finite // self.pool.block_size) :])

    def give_back(self, request: Request) -> None:
        self.pool.release(request.tables[self._group].held, request)

    def take_changes(self) -> list[BlockChange]:
        """Return the block table changes since the last call, oldest first."""
        changes, self._changes = self._changes, []
        return changes

    def take_states(self, requests: list[Request]) -> StateChanges:
        """Return the snapshots that the step of these requests restores and saves; none without recurrent layers."""
        return NO_STATES

    def clear_cache(self) -> None:
        """Empty the prefix cache."""
        self.pool.clear_cache()

    def check(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError unless every block is free, cached, or held by these requests."""
        self.pool.check()
        tables = [request.tables[self._group].held for request in holders if request.tables]
        ref_counts = self.pool.ref_counts()
        for block in chain(*tables, self.pool.pinned.elements()):
            ref_counts[block] -= 1
        assert not any(ref_counts), "blocks are lost"

    def _has(self, block_hash: bytes, below: Below) -> bool:
        return self.pool.has(block_hash) or below(self._group, block_hash)

    def _reads_cache(self, request: Request) -> bool:
        return self.pool.enable_prefix_caching and not request.prefix.skip_reading

    def _count(self, request: Request) -> None:
        request.capacity = min([len(table.blocks) for table in request.tables]) * self.pool.block_size

    def _send(self, request: Request, index: int) -> None:
        """Send the block table of a request, from block `index` on, to the runner."""
        table, size = request.tables[self._group], self.pool.block_size
        invalid = self.pool.take_invalid(table.blocks[max(index, table.num_released) :])
        starts = [(block, max(0, request.computed - table.place(block) * size)) for block in invalid]
        cleared = [(block, start) for block, start in starts if start < size]
        self._changes.append(BlockChange(request.slot, index, table.blocks[index:], cleared, self._group))
