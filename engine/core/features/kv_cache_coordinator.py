"""KV cache groups of one model, as one to its scheduler. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.block_pool import BlockPool
from engine.core.features.state_cache_manager import OneSnapshot, StateCacheManager
from engine.core.features.token_limit import TokenLimit
from engine.core.features.windowed_kv_cache import WindowedKVCacheManager, WindowRoom
from engine.core.kv_cache_manager import KVCacheManager, Shorten, StateChanges
from engine.core.request import Request
from engine.model.kv_groups import KVCacheSpec
from engine.wire.plan import BlockChange


def kv_cache_of(
    specs: Sequence[KVCacheSpec],
    pools: Sequence[BlockPool],
    step_tokens: int,
    least_chunk: int = 1,
    snapshots: BlockPool | None = None,
    snapshot_interval: int = 0,
) -> tuple[KVCacheManager, list[TokenLimit]]:
    """Return the manager of a model's KV cache groups, and what limits the tokens of a step for its sake.

    step_tokens: of a prompt, for which groups with a window give blocks before it starts. least_chunk: those that are
    computed in one step even if others lose their blocks for them. snapshots: of the states of recurrent layers, if
    there are any, which are kept every `snapshot_interval` tokens as well.
    """
    managers: list[KVCacheManager] = []
    limits: list[TokenLimit] = []
    for group, (spec, pool) in enumerate(zip(specs, pools, strict=True)):
        if spec.window is None:
            managers.append(KVCacheManager(pool, group))
        else:
            managers.append(WindowedKVCacheManager(pool, spec, step_tokens, group))
            limits.append(WindowRoom(pool, least_chunk))
    if snapshots is not None:
        managers.append(StateCacheManager(snapshots, managers[0], snapshot_interval))
        limits.append(OneSnapshot())
    return managers[0] if len(managers) == 1 else KVCacheCoordinator(managers), limits


class KVCacheCoordinator(KVCacheManager):
    """Has the methods of a manager, and one manager for each KV cache group. A model whose layers are alike has none.

    Each group has its own pool, over one chain of hashes. A request holds blocks in all of them or in none, and a
    prefix counts as cached as far as every group has what it needs of it. After vLLM's class of this name.
    """

    def __init__(self, managers: Sequence[KVCacheManager]):
        """managers: of each group; the first is of one that keeps all tokens, if there is one, the last that of
        states."""
        super().__init__(managers[0].pool)
        self._managers = managers

    @property
    def pools(self) -> list[BlockPool]:
        return [pool for manager in self._managers for pool in manager.pools]

    def match(self, request: Request, shorten: Shorten) -> int:
        count = super().match(request, shorten)
        while True:
            longest, size = count, self.pool.block_size
            for manager in self._managers:
                count = shorten(request, manager.longest_hit(request.hashes(count, size)), size)
            if count == longest:
                return count

    def in_flight(self, request: Request, matched: int, running: Iterable[Request]) -> bool:
        others = list(running)
        return any(manager.in_flight(request, matched, others) for manager in self._managers)

    def reserve(self, request: Request, matched: int, start: int, tokens: int, watermark: int) -> bool:
        plans = [(manager, *manager.plan(request, matched, start, tokens)) for manager in self._managers]
        if not all(manager.can_reserve(table, count, watermark) for manager, table, count in plans):
            return False
        for manager, table, count in plans:
            manager.take(request, table, count)
        return True

    def add_sequence(self, request: Request) -> None:
        for manager in self._managers:
            manager.add_sequence(request)

    def received(self, request: Request) -> int:
        return min(manager.received(request) for manager in self._managers)

    def grow(self, request: Request, tokens: int) -> bool:
        return all(manager.grow(request, tokens) for manager in self._managers)

    def cache_blocks(self, request: Request, computed: int) -> None:
        for manager in self._managers:
            manager.cache_blocks(request, computed)

    def invalidate(self, request: Request, first: int = 0) -> None:
        for manager in self._managers:
            manager.invalidate(request, first)

    def num_unshared(self, *requests: Request) -> int:
        return sum(manager.num_unshared(*requests) for manager in self._managers)

    def give_back(self, request: Request) -> None:
        for manager in self._managers:
            manager.give_back(request)

    def take_changes(self) -> list[BlockChange]:
        return [change for manager in self._managers for change in manager.take_changes()]

    def take_states(self, requests: list[Request]) -> StateChanges:
        return self._managers[-1].take_states(requests)

    def clear_cache(self) -> None:
        for manager in self._managers:
            manager.clear_cache()

    def check(self, holders: Iterable[Request]) -> None:
        requests = list(holders)
        for manager in self._managers:
            manager.check(requests)
