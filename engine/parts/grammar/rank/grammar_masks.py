"""Bans the tokens that grammars do not allow."""

from __future__ import annotations

import numpy as np
import torch

from engine.devices.device import StagedCopy
from engine.model.ops.logits import masks
from engine.runner.rank_part import RankPart
from engine.runner.step import EditLogits
from engine.runner.step_layout import SampledTokens
from engine.wire.plan import StepPlan


class GrammarMasks(RankPart):
    name = "grammar"

    def __init__(self, device: torch.device):
        self._apply_masks = masks.select(device)

    def edits(self, plan: StepPlan, sampled: SampledTokens, staged: StagedCopy) -> EditLogits | None:
        if not plan.masked:
            return None
        masked = np.flatnonzero(np.isin(sampled.entries, plan.masked))
        bits = np.frombuffer(plan.masks, dtype=np.uint8).reshape(len(masked), -1)
        rows, allowed = staged.add(masked), staged.add(bits.copy())  # torch warns of read-only arrays
        return lambda logits: self._apply_masks(logits, rows, allowed)
