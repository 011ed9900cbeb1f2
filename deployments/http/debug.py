"""Routes for operators: the version, the load, and live handoffs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

import msgspec

from deployments.replicas.pools import EnginePool, ModelReplicas
from engine.wire.stats.handoff_stats import HandoffInfo

VERSION = version("manta-serve")


class Version(msgspec.Struct):
    version: str = VERSION


class ServerLoad(msgspec.Struct):
    server_load: int
    """Number of waiting and running sequences of this ingress."""


class LiveHandoff(msgspec.Struct):
    """One handoff as seen by one of its engines within the last second."""

    model: str
    engine: str
    handoff: HandoffInfo


class LiveHandoffs(msgspec.Struct):
    """The oldest MAX_LIVE_HANDOFFS handoffs of each engine, oldest first."""

    handoffs: list[LiveHandoff]


async def live_handoffs(pools: Mapping[str, EnginePool]) -> LiveHandoffs:
    """Return the KV transfers in progress between engines, leaving out replicas that do not answer. pools: by model
    name."""
    handoffs = [
        LiveHandoff(replicas.model, status.engine_id, handoff)
        for replicas in await ModelReplicas.of_all(pools)
        for status in replicas.all
        for handoff in status.live_handoffs
    ]
    return LiveHandoffs(sorted(handoffs, key=lambda live: -live.handoff.age_s))
