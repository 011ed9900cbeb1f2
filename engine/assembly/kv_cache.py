"""Makes the manager of an engine's KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.block_pool import BlockPool
from engine.core.door.part import Part
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.parts.setup import Loaded


def make_kv_cache(loaded: Loaded) -> tuple[KVCacheManager, Sequence[Part]]:
    """Return the manager, and the parts that limit steps to it."""
    model, runner = loaded.model, loaded.runner
    prefix_caching = loaded.config.enable_prefix_caching and not model.bidirectional
    if len(model.kv_groups) > 1 or model.kv_groups[0].spec.window is not None or runner.memory.more_blocks:
        from engine.parts.kv_groups.make_groups import make_groups  # most models have only layers that keep all tokens

        return make_groups(loaded, prefix_caching)
    size = runner.kv_caches[0][:1].nbytes
    pool = BlockPool(runner.num_blocks[0], runner.block_size, prefix_caching, block_bytes=size)
    return KVCacheManager([SingleTypeKVCacheManager(pool)]), []
