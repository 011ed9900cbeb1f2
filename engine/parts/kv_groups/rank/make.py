"""Makes what a rank of a recurrent model keeps besides KV."""

from __future__ import annotations

from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup


def make(setup: RankSetup) -> RankPart | None:
    if setup.whole.recurrent is None:
        return None
    from engine.parts.kv_groups.rank.states import States

    return States(setup)
