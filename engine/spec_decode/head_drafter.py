"""Drafting with one or two layers on top of the target's hidden states: EAGLE-3 and multi-token prediction.

Such a head takes the hidden state of a token together with the next token, and guesses the token after that. For
further guesses the head's own hidden state replaces the target's. The head computes such a pair for every row of the
target's step. So its KV lacks only tokens that this engine did not compute because their KV came from another engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine.device import Device
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.spec_decode.draft_cache import DraftCache
from engine.spec_decode.drafter import DraftInputs
from engine.spec_decode.target import Target
from engine.wire.plan import StepPlan


class Head(Protocol):
    def target_states(self, step: DraftInputs) -> Tensor:
        """Return [rows, hidden], computed from the target's hidden states."""

    def __call__(self, input_ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the states from which logits are computed, and the hidden states for the next token; [rows, hidden]
        each."""

    def best(self, hidden: Tensor) -> Tensor:
        """Return the most likely token of each row as the target's id: [rows, hidden] -> [rows] int64."""


class HeadDrafter:
    reads_all = True

    def __init__(self, head: Head, cfg: ModelConfig, target: Target, aux_layers: tuple[int, ...] = ()):
        """cfg: configuration of the head's layers."""
        self.aux_layers = aux_layers
        self._head, self._cache = head, DraftCache(cfg, target)
        self.block_bytes = self._cache.block_bytes

    def allocate(self, num_blocks: int) -> None:
        self._cache.allocate(num_blocks)

    def follow(self, plan: StepPlan) -> None:
        self._cache.follow(plan)

    def propose(self, step: DraftInputs) -> Tensor:
        hidden = self._head.target_states(step)
        out, hidden = self._head(step.next_ids, hidden, self._cache.own(step.batch))
        rows, count = step.last_rows, step.plan.num_drafts
        if not count or not step.entries:
            return rows.new_empty(len(rows), 0)
        first, positions = self._head.best(out[rows]), step.batch.positions[rows]
        return self._cache.continue_drafts(step, step.entries, first, hidden[rows], positions, self._forward)

    def capture(self, device: Device, sizes: Sequence[int], max_blocks: int, num_drafts: int, budget: int) -> None:
        self._cache.capture(device, self._forward, sizes, max_blocks, num_drafts, budget)

    def _forward(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        out, hidden = self._head(ids, hidden, batch)
        return self._head.best(out), hidden
