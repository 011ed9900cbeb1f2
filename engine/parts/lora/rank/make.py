"""Makes the adapters of a rank."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup


def make(setup: RankSetup) -> RankPart | None:
    if not setup.config.of(EngineConfig).enable_lora:
        return None
    from engine.parts.lora.rank.adapters import Adapters

    return Adapters(setup)
