"""Makes the KV worker of a rank."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup


def make(setup: RankSetup) -> RankPart | None:
    if setup.config.of(EngineConfig).handoff is None:
        return None
    from engine.parts.handoffs.rank.kv_workers import KVWorkers  # it needs pyzmq

    return KVWorkers(setup)
