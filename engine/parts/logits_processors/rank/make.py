"""Makes what edits logits on a rank that samples."""

from __future__ import annotations

from engine.parts.logits_processors.rank.logits_processors import LogitsProcessors
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup


def make(setup: RankSetup) -> RankPart | None:
    if not setup.model.stage.is_last:
        return None
    return LogitsProcessors(setup.model.vocab_size, setup.model.eos_token_ids, setup.torch_device)
