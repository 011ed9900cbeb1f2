"""Makes the KV cache groups of an engine."""

from __future__ import annotations

from engine.core.block_pool import BlockPool
from engine.core.door.part import Part
from engine.core.kv_cache_manager import KVCacheManager
from engine.parts.kv_groups.kv_cache_groups import kv_cache_of
from engine.parts.kv_groups.rank.snapshot_memory import snapshot_border, snapshot_interval, specs_of
from engine.parts.setup import Loaded
from engine.runner.kv_cache import window_step_tokens


def make_groups(loaded: Loaded, prefix_caching: bool) -> tuple[KVCacheManager, list[Part]]:
    """Return the manager of several groups, of windows, or of recurrent states, and the parts that limit steps to
    them."""
    config, model, runner = loaded.config, loaded.model, loaded.runner
    snapshots, interval = None, 0
    for kept in runner.memory.more_blocks:
        snapshots = BlockPool(len(kept), snapshot_border(runner.block_size), prefix_caching, block_bytes=kept[0].nbytes)
        specs = specs_of(runner.setup, model)
        interval = snapshot_interval(config, runner.block_size, model, specs, runner.kv_dtype, runner.tp)
    return kv_cache_of(
        [group.spec for group in model.kv_groups],
        [
            BlockPool(count, runner.block_size, prefix_caching, group.spec.window is not None, kv[:1].nbytes)
            for count, group, kv in zip(runner.num_blocks, model.kv_groups, runner.kv_caches, strict=True)
        ],
        step_tokens=window_step_tokens(config, model),
        least_chunk=max(1, model.longest_span),
        snapshots=snapshots,
        snapshot_interval=interval,
    )
