"""Makes what encodes images on a rank."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup


def make(setup: RankSetup) -> RankPart | None:
    if setup.model.vision is None and setup.config.of(EngineConfig).encode is None:
        return None
    from engine.parts.images.rank.images import Images

    return Images(setup)
