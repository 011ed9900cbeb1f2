from __future__ import annotations

import numpy as np
import torch

from engine.parts.grammar.rank.grammar_masks import GrammarMasks
from engine.runner.step_layout import SampledTokens
from engine.wire.plan import StepPlan
from tests.late_device import LateDevice

VOCAB = 10


def edited(plan: StepPlan, entries: list[int]) -> list[set[int]] | None:
    """The tokens that each row may become; None if nothing is edited."""
    numbers = np.arange(len(entries))
    staged = LateDevice().staged_copy()
    edit = GrammarMasks(torch.device("cpu")).edits(plan, SampledTokens(entries, numbers, numbers, numbers), staged)
    if edit is None:
        return None
    staged.send()
    logits = torch.zeros(len(entries), VOCAB)
    edit(logits)
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in logits]


def test_each_token_of_an_entry_with_a_grammar_obeys_its_own_mask():
    """The second entry has a draft, so two tokens are sampled for it."""
    masks = bytes([0b1001, 0, 0b10, 0b1, 0xFF, 0b11])
    plan = StepPlan(0, [], [], [3, 5, 6], [9, 9, 9], [1, 2, 1], [True] * 3, masked=[1, 2], masks=masks)
    every = set(range(VOCAB))
    assert edited(plan, [0, 1, 1, 2]) == [every, {0, 3}, {1, 8}, every]


def test_a_step_without_a_grammar_is_left_alone():
    assert edited(StepPlan(0, [], [], [3], [9], [1], [True]), [0]) is None
