"""Makes the drafts of a rank."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup


def make(setup: RankSetup) -> RankPart | None:
    if setup.config.of(EngineConfig).speculative_config is None:
        return None
    from engine.parts.speculation.rank.drafting import Drafting

    return Drafting(setup)
