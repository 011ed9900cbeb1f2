"""Makes the tiers below the KV cache of a rank."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup


def make(setup: RankSetup) -> RankPart | None:
    if not setup.config.of(EngineConfig).offloads_kv:
        return None
    from engine.parts.kv_tiers.rank.kv_tiers import KVTiers  # it needs packages that other engines do without

    return KVTiers(setup)
