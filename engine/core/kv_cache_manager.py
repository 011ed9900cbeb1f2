"""Block tables of the requests, and the prefix cache. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.block_pool import BlockPool
from engine.core.request import Request
from engine.wire.plan import BlockChange


class KVCacheManager:
    """Allocates blocks of the pool for requests, shares them through its prefix cache, and gives them back.

    Changes of the block tables of running requests are kept until the next step's plan takes them to the ranks.
    """

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self._changes: list[BlockChange] = []

    def match(self, request: Request) -> list[int]:
        """Return cached blocks that hold a prefix of the request; its last token is always computed, for its logits."""
        if not self._reads_cache(request):
            return []
        full = (len(request.tokens) - 1) // self._pool.block_size
        return self._pool.match(request.hashes(full, self._pool.block_size))

    def in_flight(self, request: Request, matched: int, running: Iterable[Request]) -> bool:
        """Return whether the block after the `matched` ones is in a step under way for another request: a step later it
        will be in the cache."""
        count, size = matched + 1, self._pool.block_size
        if not self._reads_cache(request) or count * size >= len(request.tokens):
            return False
        wanted = request.hashes(count, size)[-1]
        return any(
            other.num_cached_blocks < count <= min(other.computed, len(other.tokens)) // size
            and other.hashes(count, size)[-1] == wanted
            for other in running
        )

    def reserve(self, request: Request, matched: list[int], tokens: int, watermark: int) -> bool:
        """Give a request the matched blocks, and new ones for the rest of `tokens` tokens. False, and nothing has
        changed, if fewer than `watermark` blocks would be left."""
        blocks = self._pool.reserve(matched, self._pool.blocks_for(tokens) - len(matched), watermark=watermark)
        if blocks is None:
            return False
        request.blocks, request.num_cached_blocks = blocks, len(matched)
        return True

    def add_sequence(self, request: Request) -> None:
        """Send the block table of a request that was given a slot to the runner."""
        self._send(request, 0)

    def grow(self, request: Request, tokens: int) -> bool:
        """Give a running request blocks for `tokens` tokens in all. False if there are too few."""
        missing = self._pool.blocks_for(tokens) - len(request.blocks)
        if missing <= 0:
            return True
        new = self._pool.allocate(missing)
        if new is None:
            return False
        request.blocks += new
        self._send(request, len(request.blocks) - missing)
        return True

    def capacity(self, request: Request, tokens: int, wanted: int) -> int:
        """Return for how many tokens after the first `tokens` a running request has blocks. Up to `wanted` it gets new
        ones, if there are any."""
        self.grow(request, tokens + wanted)
        return len(request.blocks) * self._pool.block_size - tokens

    def cache_blocks(self, request: Request, computed: int) -> None:
        """Enter the full blocks of the first `computed` tokens into the prefix cache, of those that are known."""
        first, size = request.num_cached_blocks, self._pool.block_size
        if computed < (first + 1) * size or not self._pool.enable_prefix_caching:
            return
        full = max(first, min(computed, len(request.tokens)) // size)
        hashes = request.hashes(full, size)
        for index in range(first, full):
            own = request.blocks[index]
            block = self._pool.cache_block(own, hashes[index])
            if block != own:  # another request computed the same prefix: share its copy
                request.blocks[index] = block
                if request.slot >= 0:
                    self._changes.append(BlockChange(request.slot, index, [block]))
        request.num_cached_blocks = full

    def invalidate(self, request: Request, first: int = 0) -> None:
        """Have the blocks of a request, from the `first` on, cleared before anyone else gets them: they may hold
        numbers that are not finite."""
        self._pool.invalidate(request.blocks[first:])

    def num_unshared(self, request: Request) -> int:
        """Return how many blocks would become free if this request gave its blocks back."""
        return self._pool.num_unshared(request.blocks)

    def release(self, request: Request) -> None:
        self._pool.release(request.blocks)
        request.blocks = []
        request.computed = request.num_cached_blocks = 0

    def take_changes(self) -> list[BlockChange]:
        """Return the changes since the last call, oldest first."""
        changes, self._changes = self._changes, []
        return changes

    def _reads_cache(self, request: Request) -> bool:
        return self._pool.enable_prefix_caching and not request.prefix.skip_reading

    def _send(self, request: Request, index: int) -> None:
        """Send the blocks from `index` on to the runner."""
        blocks, size = request.blocks[index:], self._pool.block_size
        cleared = [
            (block, max(0, request.computed - request.blocks.index(block) * size))
            for block in self._pool.take_invalid(blocks)
        ]
        self._changes.append(BlockChange(request.slot, index, blocks, cleared))
