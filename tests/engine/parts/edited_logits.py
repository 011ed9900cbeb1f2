"""Logits as parts change them before sampling."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.parts.logits_processors.rank.logits_processors import LogitsProcessors
from engine.parts.thinking_budget.rank.forced_ends import ForcedEnds
from engine.runner.rank_part import RankParts
from engine.runner.step import EditLogits, StepMemory
from engine.runner.step_layout import SampledTokens
from engine.wire.plan import NewSequence, StepPlan
from engine.wire.sampling_params import SamplingParams
from tests.engine.runner.sampling_cases import EOS, LOGITS, VOCAB, Sequence, history_of
from tests.late_device import LateDevice


def edits_of(batch: list[Sequence], slots: list[int]) -> list[EditLogits]:
    """What parts change in the logits of sequences that are new in a step and sample a token each. They prepare it on a
    late device: while nothing sent there can be read yet, nor the newest token of any sequence exists."""
    parts = RankParts([LogitsProcessors(VOCAB, EOS, torch.device("cpu")), ForcedEnds()])
    history = torch.full((8, 16), -5, dtype=torch.int32)
    for allocate in parts.allocate:
        allocate(StepMemory([], [], history))
    lengths = [len(sequence.tokens) for sequence in batch]
    plan = StepPlan(
        step=0,
        added=[
            NewSequence(slot, sequence.tokens, sequence.num_prompt, sequence.params, sequence.seed)
            for slot, sequence in zip(slots, batch, strict=True)
        ],
        blocks=[],
        slots=slots,
        starts=[0] * len(slots),
        counts=lengths,
        samples=[True] * len(slots),
    )
    sampled = SampledTokens(list(range(len(slots))), np.array(slots), np.cumsum(lengths) - 1, np.array(lengths))
    staged = LateDevice().staged_copy()
    found = [edit for edits in parts.edits if (edit := edits(plan, sampled, staged)) is not None]
    staged.send()
    history.copy_(history_of(batch, slots))
    return found


def edited(batch: list[Sequence], slots: list[int]) -> Tensor:
    """The logits of all."""
    logits = torch.stack([sequence.logits for sequence in batch])
    for edit in edits_of(batch, slots):
        edit(logits)
    return logits


def process(params: SamplingParams, prompt: list[int], output: list[int]) -> Tensor:
    """LOGITS as the parameters of one sequence change them."""
    return edited([Sequence(params, 0, [*prompt, *output], len(prompt), LOGITS)], [3])[0]


def banned(logits: Tensor) -> set[int]:
    return set(torch.isneginf(logits).nonzero().flatten().tolist())
