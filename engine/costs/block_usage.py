"""Divides the time for which KV blocks are used among those who hold them. Pure Python: no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine.core.block_pool import BlockHolder, BlockObserver
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.costs.request_cost import BlockAccount, cost_of


class BlockUsage(BlockObserver):
    """Block time of one pool, divided exactly: at any time, a block with n references costs each of them 1/n.

    For each block, this records what one reference would have cost since the start. A holder pays the difference
    between the end and the start of its reference, so a step that changes no reference costs nothing. Fractions of a
    nanosecond are carried over, and the last reference takes what is left.
    """

    def __init__(self, num_blocks: int, group: int = 0, held: Callable[[Request], Sequence[int]] | None = None):
        """num_blocks: highest block number of the pool, plus one. group: the pool's KV cache group. Nobody may have
        references to the pool's blocks yet. held: returns the blocks of a request; by default those of its table."""
        self.held = held or self._in_table
        #: Now, in nanoseconds. The owner moves it; all changes until the next move happen at this time.
        self.now_ns = 0
        #: Pays for the references that neither a request nor a hold has.
        self.shared = BlockAccount()
        self._group = group
        self._num_used = self._used_ns = 0
        self._references = [0] * num_blocks
        self._since = [0] * num_blocks
        self._per_reference = [0] * num_blocks
        self._rest = [0] * num_blocks

    def taken(self, blocks: Sequence[int], holder: BlockHolder | None) -> None:
        account = self._account(holder)
        for block in blocks:
            if references := self._references[block]:
                self._divide(block)
            else:
                self._since[block] = self.now_ns
                self._num_used += 1
                self._used_ns -= self.now_ns
            self._references[block] = references + 1
            account.block_ns -= self._per_reference[block]

    def returned(self, blocks: Sequence[int], holder: BlockHolder | None) -> None:
        account = self._account(holder)
        for block in blocks:
            self._divide(block)
            self._references[block] = references = self._references[block] - 1
            account.block_ns += self._per_reference[block]
            if not references:
                account.block_ns += self._rest[block]
                self._rest[block] = 0
                self._num_used -= 1
                self._used_ns += self.now_ns

    @property
    def used_ns(self) -> int:
        """Time until now for which blocks had references, over all blocks."""
        return self._used_ns + self._num_used * self.now_ns

    @property
    def carried_ns(self) -> int:
        """Fractions of a nanosecond that are carried over until the last holder of a block pays them."""
        return sum(self._rest)

    def block_time(self, account: BlockAccount, held: Iterable[int]) -> int:
        """Return the block time of a holder until now. held: the blocks to which it has references."""
        total = account.block_ns
        for block in held:
            self._divide(block)
            total += self._per_reference[block]
        return total

    def share(self, held: Iterable[int]) -> float:
        """Return how many of the pool's blocks a holder uses, if each is divided among all who hold it."""
        return sum(1 / self._references[block] for block in held)

    def _in_table(self, request: Request) -> Sequence[int]:
        return request.tables[self._group].held

    def _account(self, holder: BlockHolder | None) -> BlockAccount:
        return self.shared if holder is None else cost_of(holder).blocks[self._group]

    def _divide(self, block: int) -> None:
        """Charge the holders of a block until now."""
        elapsed = self.now_ns - self._since[block] + self._rest[block]
        share, self._rest[block] = divmod(elapsed, self._references[block])
        self._per_reference[block] += share
        self._since[block] = self.now_ns


def observe_usage(kv_cache: KVCacheManager) -> list[BlockUsage]:
    """Return the usage of the pool of each KV cache group from now on. Nobody may have references to blocks yet."""
    usages = []
    for group, manager in enumerate(kv_cache.groups):
        usages.append(BlockUsage(len(manager.pool.ref_counts()), group, manager.held))
        manager.pool.observers.append(usages[-1])
    return usages
