"""Makes what applies the masks of grammars on a rank that samples."""

from __future__ import annotations

from engine.parts.grammar.rank.grammar_masks import GrammarMasks
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup


def make(setup: RankSetup) -> RankPart | None:
    return GrammarMasks(setup.torch_device) if setup.model.stage.is_last else None
