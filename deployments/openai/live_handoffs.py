"""The response of /debug/handoffs: KV that is on its way between engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from deployments.replicas.engine_pool import EnginePool, all_statuses
from engine.wire.handoff_stats import HandoffInfo


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
    found = await asyncio.gather(*map(all_statuses, pools.values()))
    handoffs = [
        LiveHandoff(model, status.engine_id, handoff)
        for model, (decode, prefill) in zip(pools, found, strict=True)
        for status in decode + prefill
        for handoff in status.live_handoffs
    ]
    return LiveHandoffs(sorted(handoffs, key=lambda live: -live.handoff.age_s))
