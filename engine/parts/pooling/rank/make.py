"""Makes what pools hidden states on a rank."""

from __future__ import annotations

from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup


def make(setup: RankSetup) -> RankPart | None:
    from engine.parts.pooling.rank.pooling import Pooler

    return Pooler(setup)
