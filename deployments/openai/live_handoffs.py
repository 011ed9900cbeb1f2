"""The answer of /debug/handoffs: KV that is on its way between engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from deployments.engine_pool import EnginePool
from engine.errors import EngineUnavailable
from engine.kv_transfer.stats import HandoffInfo
from engine.messages import EngineStatus


class LiveHandoff(msgspec.Struct):
    """One handoff as one of its engines saw it within the last second."""

    model: str
    engine: str
    handoff: HandoffInfo


class LiveHandoffs(msgspec.Struct):
    """At most MAX_LIVE_HANDOFFS of each engine, oldest first."""

    handoffs: list[LiveHandoff]


async def live_handoffs(pools: Mapping[str, EnginePool]) -> LiveHandoffs:
    """pools: by model name. Replicas that do not answer are left out."""
    found = await asyncio.gather(*map(_statuses, pools.values()))
    handoffs = [
        LiveHandoff(model, status.engine_id, handoff)
        for model, statuses in zip(pools, found, strict=True)
        for status in statuses
        for handoff in status.live_handoffs
    ]
    return LiveHandoffs(sorted(handoffs, key=lambda live: -live.handoff.age_s))


async def _statuses(pool: EnginePool) -> list[EngineStatus]:
    try:
        decode = await pool.statuses()
    except EngineUnavailable:
        decode = []
    return decode + await pool.prefill_statuses()
