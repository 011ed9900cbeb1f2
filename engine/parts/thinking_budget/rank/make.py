"""Makes what ends reasoning on a rank that samples."""

from __future__ import annotations

from engine.parts.thinking_budget.rank.forced_ends import ForcedEnds
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup


def make(setup: RankSetup) -> RankPart | None:
    return ForcedEnds() if setup.model.stage.is_last else None
