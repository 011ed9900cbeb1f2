"""Edits the logits of sequences whose sampling parameters ask for it."""

from __future__ import annotations

import sys
from collections.abc import Collection

import torch

from engine.devices.device import StagedCopy
from engine.model.ops import dispatch
from engine.model.ops.logits import penalties
from engine.parts.logits_processors.rank.batch_edits import COUNTERS, RowEdits, apply, prepare
from engine.parts.logits_processors.rank.logits_edits import LogitsEdits
from engine.parts.of_sequences import OfSequences
from engine.runner.rank_part import RankPart
from engine.runner.step import EditLogits, StepMemory
from engine.runner.step_layout import SampledTokens
from engine.wire.plan import StepPlan


class LogitsProcessors(RankPart):
    name = "logits_processors"

    def __init__(self, vocab_size: int, eos: Collection[int], device: torch.device):
        """eos: tokens that end a generation."""
        self._vocab_size, self._eos = vocab_size, frozenset(eos)
        self._penalise = penalties.select(device)
        own_kernel = dispatch.gpu_kernels(torch.float32, device)  # which needs no counters of tokens
        self._counters = sys.maxsize if own_kernel else COUNTERS
        self._of_sequences = OfSequences[LogitsEdits]()

    def allocate(self, memory: StepMemory) -> None:
        self._history = memory.history

    def edits(self, plan: StepPlan, sampled: SampledTokens, staged: StagedCopy) -> EditLogits | None:
        self._of_sequences.add(plan.added, lambda new: LogitsEdits.of(new, self._eos))
        if not self._of_sequences:
            return None
        rows = [RowEdits(*row) for row in self._of_sequences.rows(sampled)]
        prepared = prepare(rows, self._vocab_size, staged.add, self._counters)
        if prepared is None:
            return None
        return lambda logits: apply(logits, prepared, self._history, self._penalise)
