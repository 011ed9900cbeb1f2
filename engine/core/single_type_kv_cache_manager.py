"""The block tables of one KV cache group, and its part of the prefix cache. Pure Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from engine.core.block_pool import BlockPool
from engine.core.request import BlockTable, Request
from engine.wire.plan import BlockChange

Below = Callable[[int, bytes], bool]
"""(KV cache group, hash) -> whether a tier below has the block"""


def nowhere(group: int, block_hash: bytes) -> bool:
    """Return False: no tier has the block if there are no tiers."""
    return False


class SingleTypeKVCacheManager:
    """Manages the blocks of a KV cache group whose layers attend to all tokens; subclasses those of other groups
    (parts/kv_groups). After vLLM's class of this name."""

    kind = "full_attention"  #: vLLM's name of what the layers of the group are
    window: int | None = None  #: newest tokens whose KV is kept; None keeps all
    shows_load = True  #: whether the used part of its pool shows the engine's load, and watermarks apply to it

    def __init__(self, pool: BlockPool, group: int = 0):
        self.pool, self._group = pool, group
        self.changes: list[BlockChange] = []

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
        """Return whether a running request has to compute what comes after the `matched` blocks."""
        count, size = matched + 1, self.pool.block_size
        if count * size >= len(request.tokens):
            return False
        wanted = request.hashes(count, size)[-1]
        return any(
            other.tables[self._group].num_cached < count <= len(other.tokens) // size
            and other.hashes(count, size)[-1] == wanted
            for other in running
        )

    def plan(self, request: Request, matched: int, start: int, tokens: int) -> tuple[BlockTable, int]:
        """Return the block table of a request with its cached blocks, and how many new blocks it needs after them."""
        blocks = self.pool.match(request.hashes(matched, self.pool.block_size))
        return BlockTable(blocks, matched), self.pool.blocks_for(tokens) - matched

    def take(self, request: Request, table: BlockTable, missing: int) -> None:
        """Carry out a `plan` for which the pool has enough blocks."""
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
        """Enter the full blocks of the first `computed` tokens into the prefix cache."""
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
                    self.changes.append(BlockChange(request.slot, index, [block], group=self._group))
        table.num_cached, table.next_full = full, (full + 1) * size

    def invalidate(self, request: Request, first: int = 0) -> None:
        """Mark the blocks of a request from index `first` on as possibly non-finite."""
        table = request.tables[self._group]
        self.pool.invalidate(table.blocks[max(first, table.num_released) :])

    def to_continue(self, request: Request) -> tuple[int, list[int]] | None:
        """Return the blocks with which another engine can continue after the known tokens, and how many blocks come
        before them. Returns None if some are gone."""
        table = request.tables[self._group]
        last = self.pool.blocks_for(len(request.tokens))
        return table.num_released, table.blocks[table.num_released : last]

    def held(self, request: Request) -> list[int]:
        """Return the blocks that a request holds, one entry for each reference."""
        return request.tables[self._group].held if request.tables else []

    def free(self, request: Request) -> None:
        """Release what a request holds."""
        self.pool.release(request.tables[self._group].held, request)

    def check(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError unless every block is free, cached, or held by these requests."""
        tables = [request.tables[self._group].held for request in holders if request.tables]
        self.pool.check(Counter(chain(*tables)))

    def _has(self, block_hash: bytes, below: Below) -> bool:
        return self.pool.has(block_hash) or below(self._group, block_hash)

    def _count(self, request: Request) -> None:
        request.capacity = min([len(table.blocks) for table in request.tables]) * self.pool.block_size

    def _send(self, request: Request, index: int) -> None:
        """Send the block table of a request, from block `index` on, to the runner."""
        table, size = request.tables[self._group], self.pool.block_size
        invalid = self.pool.take_invalid(table.blocks[max(index, table.num_released) :])
        starts = [(block, max(0, request.computed - table.place(block) * size)) for block in invalid]
        cleared = [(block, start) for block, start in starts if start < size]
        self.changes.append(BlockChange(request.slot, index, table.blocks[index:], cleared, self._group))
