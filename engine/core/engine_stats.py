"""Load and statistics that one engine reports to others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.core.block_pool import BlockPool
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import State
from engine.core.scheduler import Scheduler
from engine.wire.part_record import encoded
from engine.wire.stats.engine_stats import EngineLoad, EngineStats


def load_of(scheduler: Scheduler) -> EngineLoad:
    """Return the load by which routers choose an engine."""
    queue, kv_cache = scheduler.queue, scheduler.kv_cache
    fields: dict[str, Any] = block_load(kv_cache.pools, [0] * len(kv_cache.pools))
    for load in scheduler.parts.load:
        fields |= load([*queue.waiting, *queue.running])
    return EngineLoad(
        sequences=len(queue.running) + scheduler.num_waiting + len(scheduler.parts.kept(State.WAITING_FOR_REMOTE_KV)),
        queued_tokens=queue.queued_tokens,
        slots=scheduler.config.max_num_seqs,
        **fields,
    )


def block_load(pools: Sequence[BlockPool], absent: Sequence[int]) -> dict[str, int]:
    """Return the fields of EngineLoad about blocks. absent: blocks of each pool that count as if they were not there,
    since no step reads them, and new requests cannot have them."""
    first = pools[0]
    used = max((own.num_used - left_out) / own.num_blocks for own, left_out in zip(pools, absent, strict=True))
    return {
        "blocks_used": max(first.num_used - absent[0], round(used * first.num_blocks)),  # as full as the fullest
        "blocks_total": first.num_blocks - absent[0],
    }


def stats_of(scheduler: Scheduler) -> EngineStats:
    """Return the statistics of a scheduler; EngineCore adds those about step times."""
    queue, kv_cache, totals = scheduler.queue, scheduler.kv_cache, scheduler.totals
    pool = kv_cache.pool
    pools = pools_by_name(kv_cache) if len(kv_cache.groups) > 1 else {}
    leased = scheduler.parts.kept(State.LEASED)
    filled = scheduler.parts.kept(State.WAITING_FOR_REMOTE_KV, State.FINISHED)
    return EngineStats(
        running=len(queue.running),
        waiting=scheduler.num_waiting,
        blocks_total=pool.num_blocks,
        blocks_free=pool.num_free,
        blocks_cached=pool.num_cached,
        blocks_used=pool.num_used,
        block_size=pool.block_size,
        group_blocks={
            name: {"used": own.num_used, "cached": own.num_cached, "free": own.num_free} for name, own in pools.items()
        },
        group_block_bytes={name: own.block_bytes for name, own in pools.items()},
        steps=totals.steps,
        prompt_tokens=totals.prompt_tokens,
        generation_tokens=totals.generation_tokens,
        preemptions=totals.preemptions,
        prefix_queried_tokens=totals.prefix_queried_tokens,
        prefix_hit_tokens=totals.prefix_hit_tokens,
        finished=dict(totals.finished),
        histograms=scheduler.metrics.histograms,
        blocks_reserved=kv_cache.num_unshared(*filled, *queue.waiting_with_kv),
        blocks_leased=kv_cache.num_unshared(*leased),
        receiving=len(filled),
        leased=len(leased),
        queued_tokens=queue.queued_tokens,
        parts=encoded(*(report() for report in scheduler.parts.report)),
    )


def pools_by_name(kv_cache: KVCacheManager) -> dict[str, BlockPool]:
    """Return the block pools of the KV cache groups by number, and that of recurrent states as `states`."""
    groups = enumerate(kv_cache.groups)
    return {"states" if group.kind == "mamba" else str(number): group.pool for number, group in groups}
