"""Routes for operators: the version, the load, and live handoffs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.metadata import version

import msgspec

from deployments.replicas.pools import EnginePool, all_statuses
from engine.wire.handoff_stats import HandoffInfo

VERSION = version("manta-serve")


class Version(msgspec.Struct):
    version: str = VERSION


class ServerLoad(msgspec.Struct):
    server_load: int
    """Sequences of this ingress that wait or run."""


class LiveHandoff(msgspec.Struct):
    """One handoff as one of its engines saw it within the last second."""

    model: str
    engine: str
    handoff: HandoffInfo


class LiveHandoffs(msgspec.Struct):
    """The oldest MAX_LIVE_HANDOFFS handoffs of each engine, oldest first."""

    handoffs: list[LiveHandoff]


async def live_handoffs(pools: Mapping[str, EnginePool]) -> LiveHandoffs:
    """Return KV transfers under way between engines, without those of replicas that do not answer.

    pools: by model name.
    """
    found = await asyncio.gather(*map(all_statuses, pools.values()))
    handoffs = [
        LiveHandoff(model, status.engine_id, handoff)
        for model, (decode, prefill) in zip(pools, found, strict=True)
        for status in decode + prefill
        for handoff in status.live_handoffs
    ]
    return LiveHandoffs(sorted(handoffs, key=lambda live: -live.handoff.age_s))
