"""KV of layers with a sliding window, which keep only the newest tokens of a sequence. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.block_pool import BlockPool
from engine.core.door.part import Part
from engine.core.request import BlockTable, Request
from engine.core.single_type_kv_cache_manager import Below, SingleTypeKVCacheManager, nowhere
from engine.model.kv_groups import KVCacheSpec
from engine.wire.plan import BlockChange


class WindowedKVCacheManager(SingleTypeKVCacheManager):
    """Manages the blocks of a KV cache group with a sliding window.

    A block is released once the newest committed token no longer attends to it: then every step that reads it has
    ended. A request starts with blocks for its window and one step, takes more as its prompt is computed, and never
    holds more than its window and the steps in flight need.

    Released blocks stay in the prefix cache, and the table has the null block in their place. A prefix hit needs only
    the blocks of the window before its end.
    """

    kind = "sliding_window"

    def __init__(self, pool: BlockPool, spec: KVCacheSpec, step_tokens: int, group: int = 0):
        """step_tokens: prompt tokens, besides its window, for which a request gets blocks when it starts."""
        super().__init__(pool, group)
        self._spec, self._step_tokens, self.window = spec, step_tokens, spec.window

    def longest_hit(self, hashes: Sequence[bytes], below: Below = nowhere) -> int:
        count, index = len(hashes), len(hashes) - 1
        first = self._first(count)
        while index >= first:
            if self._has(hashes[index], below):
                index -= 1
            else:
                count, index = index, index - 1
                first = self._first(count)
        return count

    def needed(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        return hashes[self._first(len(hashes)) :]

    def worth_storing(self, request: Request) -> Sequence[bytes]:
        """Return the hashes of the windows at the end of the prompt and of the answer, where later prompts diverge."""
        size = self.pool.block_size
        known = min(request.computed, len(request.tokens)) // size
        ends = min(known, request.num_prompt // size), known
        found = [each for end in ends for each in self.needed(request.hashes(end, size))]
        return [each for each in dict.fromkeys(found) if self.pool.has(each)]

    def plan(self, request: Request, matched: int, start: int, tokens: int) -> tuple[BlockTable, int]:
        size = self.pool.block_size
        released = self._spec.first_needed(start) // size
        hashes = request.hashes(matched, size)
        blocks = [0] * released + self.pool.match(hashes[released:])
        table = BlockTable(blocks, max(matched, released), released, keeps_all=False)
        return table, released + min(self.pool.blocks_for(tokens) - released, self._most) - len(blocks)

    def least(self, max_model_len: int) -> int:
        return min(super().least(max_model_len), self._most)

    @property
    def _most(self) -> int:
        """The most blocks that a request holds."""
        assert self._spec.window is not None
        return self.pool.blocks_for(self._spec.window - 1 + self._step_tokens) + 1  # a window begins inside a block

    def cache_blocks(self, request: Request, computed: int) -> None:
        super().cache_blocks(request, computed)
        table = request.tables[self._group]
        released = self._spec.first_needed(computed) // self.pool.block_size
        if self.pool.enable_prefix_caching:
            released = min(released, table.num_cached)
        if released > table.num_released:
            first, table.num_released = table.num_released, released
            self.pool.mark_unverified(table.blocks[max(first, request.finite // self.pool.block_size) : released])
            self.pool.release(table.blocks[first:released], request)
            table.blocks[first:released] = nulls = [0] * (released - first)
            if request.slot >= 0:
                self.changes.append(BlockChange(request.slot, first, nulls, group=self._group))

    def will_release(self, request: Request) -> bool:
        """Return whether the steps in flight will release blocks of a request once they are committed."""
        behind = self._spec.first_needed(request.computed) // self.pool.block_size
        return behind > request.tables[self._group].num_released

    def _first(self, count: int) -> int:
        """Return the index of the first block needed to continue after `count` blocks."""
        return self._spec.first_needed(count * self.pool.block_size) // self.pool.block_size


def window_blocks(group: SingleTypeKVCacheManager) -> int:
    """Return how many blocks at the end of a prefix suffice to continue after it; 0 if all blocks are needed. group:
    the first, whose blocks routers know."""
    return 0 if group.window is None else max(1, group.pool.blocks_for(group.window - 1))


class WindowRoom(Part):
    """Limits a prompt chunk to the blocks available in a group with a window. Its requests do not reserve blocks for
    the whole prompt, and a shorter step is better than preempting another request."""

    def __init__(self, kv_cache: WindowedKVCacheManager, least: int):
        """least: tokens to compute in one step even if other requests are preempted for them."""
        self._kv_cache, self._pool, self._least, self._kept = kv_cache, kv_cache.pool, least, 0

    def start_step(self, sequences: int) -> None:
        self._kept = sequences  # blocks: one for each sequence, which may need another

    def up_to(self, request: Request, count: int) -> int:
        room = request.capacity - request.computed
        if count <= room:
            return count
        spare = max(0, self._pool.num_available - self._kept) * self._pool.block_size
        # a request that fills the pool alone, with several steps in flight, would preempt itself again and again
        least = 0 if self._kv_cache.will_release(request) else self._least
        return min(count, max(room + spare, least))
