"""Ends reasoning that has spent its budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.devices.device import StagedCopy
from engine.parts.of_sequences import OfSequences
from engine.runner.rank_part import RankPart
from engine.runner.step import EditLogits, StepMemory
from engine.runner.step_layout import SampledTokens
from engine.wire.parts.thinking_budget import ThinkingBudget
from engine.wire.plan import NewSequence, StepPlan

BANNED = float("-inf")
NEVER = -1  # no token
# Number of positions at which the end of reasoning is tried. A grammar does not allow it inside a character, which has
# up to 4 bytes and so up to 4 tokens.
MAX_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class DueEnds:
    """Rows whose reasoning must end now, unless it has ended already."""

    where: Tensor  #: [7, rows] int64: row, slot, start of the output, length, tokens that begin and end it, and a call
    total: int  #: tokens of all outputs


class ForcedEnds(RankPart):
    name = ThinkingBudget.part

    def __init__(self) -> None:
        self._of_sequences = OfSequences[tuple[int, ThinkingBudget]]()  # start of the output, and its budget

    def allocate(self, memory: StepMemory) -> None:
        self._history = memory.history

    def edits(self, plan: StepPlan, sampled: SampledTokens, staged: StagedCopy) -> EditLogits | None:
        self._of_sequences.add(plan.added, budget_of)
        if not self._of_sequences:
            return None
        where = []
        for row, slot, position, (start, budget) in self._of_sequences.rows(sampled):
            length = position - start
            if 0 <= length - budget.ends_at < MAX_CHARACTER:
                opening, call = (NEVER if token is None else token for token in (budget.open, budget.call))
                where.append((row, slot, start, length, opening, budget.close, call))
        if not where:
            return None
        ends = DueEnds(staged.add(np.array(where, dtype=np.int64).T), sum(length for _, _, _, length, *_ in where))
        return lambda logits: force(logits, ends, self._history)


def budget_of(new: NewSequence) -> tuple[int, ThinkingBudget] | None:
    """Return the start of a sequence's output, and its budget; None if it has no budget."""
    budget = ThinkingBudget.of(new.params)
    return None if budget is None else (new.num_prompt, budget)


def force(logits: Tensor, ends: DueEnds, history: Tensor) -> None:
    """Ban all tokens but the closing tag in rows whose reasoning has begun and not ended. A row in which the closing
    tag is banned stays as it is.

    logits: [rows, vocab] float32, changed in place; history: [slots, max_model_len] int32 token ids
    """
    row, slot, start, length, opening, closing, call = ends.where.unbind()
    sequence = torch.repeat_interleave(length, output_size=ends.total)
    position = torch.arange(ends.total, device=logits.device) + (start - length.cumsum(0) + length)[sequence]
    token = history[slot[sequence], position]
    is_end = (token == closing[sequence]) | (token == call[sequence])
    num_closed = logits.new_zeros(len(row)).index_add_(0, sequence, is_end.float())
    tag = logits[row, closing]
    open_now = ((opening == NEVER) | (history[slot, start] == opening)) & (num_closed == 0) & tag.isfinite()
    logits[row] = torch.where(open_now.unsqueeze(1), BANNED, logits[row])
    logits[row, closing] = tag
