"""Makes the managers of a model's KV cache groups. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.block_pool import BlockPool
from engine.core.door.part import Part
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.model.kv_groups import KVCacheSpec
from engine.parts.kv_groups.state_cache_manager import StateCacheManager, StateSnapshots
from engine.parts.kv_groups.windowed_kv_cache import WindowedKVCacheManager, WindowRoom


def kv_cache_of(
    specs: Sequence[KVCacheSpec],
    pools: Sequence[BlockPool],
    step_tokens: int,
    least_chunk: int = 1,
    snapshots: BlockPool | None = None,
    snapshot_interval: int = 0,
) -> tuple[KVCacheManager, list[Part]]:
    """Return the manager of a model's KV cache groups, and the parts that limit steps to them and add to plans.

    step_tokens: prompt tokens per step, for which groups with a window reserve blocks when a request starts.
    least_chunk: number of tokens that a step must be able to compute for a request, even if it preempts others.
    snapshots: pool for snapshots of recurrent states; None without recurrent layers.
    snapshot_interval: tokens between the snapshots of a long sequence, 0 for none.
    """
    managers: list[SingleTypeKVCacheManager] = []
    parts: list[Part] = []
    for group, (spec, pool) in enumerate(zip(specs, pools, strict=True)):
        if spec.window is None:
            managers.append(SingleTypeKVCacheManager(pool, group))
        else:
            windowed = WindowedKVCacheManager(pool, spec, step_tokens, group)
            managers.append(windowed)
            parts.append(WindowRoom(windowed, least_chunk))
    if snapshots is not None:
        states = StateCacheManager(snapshots, managers[0], snapshot_interval, group=len(managers))
        managers.append(states)
        parts.append(StateSnapshots(states))
    return KVCacheManager(managers), parts
