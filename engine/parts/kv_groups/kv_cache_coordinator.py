"""Presents the KV cache groups of a model to the scheduler as one. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.block_pool import BlockPool
from engine.core.door.part import Part
from engine.core.kv_cache_manager import Below, KVCacheManager, Shorten, StateChanges, nowhere
from engine.core.request import Request
from engine.model.kv_groups import KVCacheSpec
from engine.parts.kv_groups.state_cache_manager import OneSnapshot, StateCacheManager
from engine.parts.kv_groups.windowed_kv_cache import WindowedKVCacheManager, WindowRoom
from engine.wire.handoff import HeldBlocks
from engine.wire.plan import BlockChange


def kv_cache_of(
    specs: Sequence[KVCacheSpec],
    pools: Sequence[BlockPool],
    step_tokens: int,
    least_chunk: int = 1,
    snapshots: BlockPool | None = None,
    snapshot_interval: int = 0,
) -> tuple[KVCacheManager, list[Part]]:
    """Return the manager of a model's KV cache groups, and their limits on a step's tokens.

    step_tokens: prompt tokens per step, for which groups with a window reserve blocks when a request starts.
    least_chunk: number of tokens that a step must be able to compute for a request, even if it preempts others.
    snapshots: pool for snapshots of recurrent states; None without recurrent layers.
    snapshot_interval: tokens between the snapshots of a long sequence, 0 for none.
    """
    managers: list[KVCacheManager] = []
    limits: list[Part] = []
    for group, (spec, pool) in enumerate(zip(specs, pools, strict=True)):
        if spec.window is None:
            managers.append(KVCacheManager(pool, group))
        else:
            windowed = WindowedKVCacheManager(pool, spec, step_tokens, group)
            managers.append(windowed)
            limits.append(WindowRoom(windowed, least_chunk))
    if snapshots is not None:
        managers.append(StateCacheManager(snapshots, managers[0], snapshot_interval, group=len(managers)))
        limits.append(OneSnapshot())
    return managers[0] if len(managers) == 1 else KVCacheCoordinator(managers), limits


class KVCacheCoordinator(KVCacheManager):
    """A KVCacheManager in front of one manager per KV cache group, for models whose layers keep different tokens.

    Each group has its own pool; all share one chain of hashes. A request holds blocks in all groups or in none. A
    prefix counts as cached only as far as every group has the blocks it needs. After vLLM's class of this name.
    """

    def __init__(self, managers: Sequence[KVCacheManager]):
        """managers: one per group. A group that keeps all tokens comes first, the group of recurrent states last."""
        super().__init__(managers[0].pool)
        self._managers = managers

    @property
    def groups(self) -> Sequence[KVCacheManager]:
        return self._managers

    @property
    def pools(self) -> list[BlockPool]:
        return [pool for manager in self._managers for pool in manager.pools]

    @property
    def window_blocks(self) -> int:
        return self._managers[0].window_blocks  # routers know the blocks of this group

    def match(self, request: Request, shorten: Shorten, below: Below = nowhere) -> int:
        count = super().match(request, shorten, below)
        while True:
            longest, size = count, self.pool.block_size
            for manager in self._managers:
                count = shorten(request, manager.longest_hit(request.hashes(count, size), below), size)
            if count == longest:
                return count

    def in_flight(self, request: Request, matched: int, running: Iterable[Request]) -> bool:
        others = list(running)
        return any(manager.in_flight(request, matched, others) for manager in self._managers)

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

    def hold(self, request: Request) -> list[HeldBlocks]:
        held = [manager.hold(request) for manager in self._managers]
        return [group for groups in held for group in groups] if all(held) else []

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
