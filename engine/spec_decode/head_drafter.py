"""Drafting with one or two layers on top of the target's hidden states: EAGLE-3 and multi-token prediction.

Such a head takes the hidden state of a token together with the next token, and guesses the token after that. For
further guesses the head's own hidden state replaces the target's. The head computes such a pair for every row of the
target's step. So its KV lacks only tokens that this engine did not compute because their KV came from another engine.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.spec_decode.draft_cache import CachedDrafter
from engine.spec_decode.drafter import DraftInputs, FirstPass
from engine.spec_decode.target import Target


class Head(Protocol):
    def target_states(self, step: DraftInputs) -> Tensor:
        """Return [rows, hidden], computed from the target's hidden states."""

    def __call__(self, input_ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the states from which logits are computed, and the hidden states for the next token; [rows, hidden]
        each."""

    def best(self, hidden: Tensor) -> Tensor:
        """Return the most likely token of each row as the target's id: [rows, hidden] -> [rows] int64."""


def tile_shape(cfg: ModelConfig) -> tuple[int, int, int]:
    """Return what the rows of a tile of attention depend on: heads for each KV head, their size, and whether the KV has
    one part or two."""
    spec = cfg.kv_groups[0].spec
    return cfg.num_heads // spec.num_kv_heads, spec.head_dim, spec.parts


class HeadDrafter(CachedDrafter):
    reads_all = True

    def __init__(self, head: Head, cfg: ModelConfig, target: Target, aux_layers: tuple[int, ...] = ()):
        """cfg: configuration of the head's layers."""
        super().__init__(cfg, target)
        self.aux_layers, self._head, self._size = aux_layers, head, cfg.hidden_size
        # a graph's tiles are made for the heads of the target
        self._tiles_alike = tile_shape(cfg) == tile_shape(target.config)

    def first_pass(self, max_tokens: int) -> FirstPass | None:
        if not self._tiles_alike:
            return None
        self._ids = torch.zeros(max_tokens, dtype=torch.int64, device=self._cache.kv.device)
        self._states = torch.zeros(max_tokens, self._size, dtype=self._cache.kv.dtype, device=self._cache.kv.device)

        def forward(ids: Tensor, batch: Batch) -> Tensor:
            out, hidden = self._head(self._ids[: len(ids)], self._states[: len(ids)], batch)
            return torch.cat((out, hidden), dim=1)

        return FirstPass(forward, self._cache.kv)

    def propose(self, step: DraftInputs) -> Tensor:
        hidden = self._head.target_states(step)
        if step.replay is None:
            out, hidden = self._head(step.next_ids, hidden, self._cache.own(step.batch))
        else:
            self._ids[: len(hidden)], self._states[: len(hidden)] = step.next_ids, hidden
            out, hidden = step.replay().split(self._size, dim=1)
        rows, count = step.last_rows, step.plan.num_drafts
        if not count or not step.entries:
            return rows.new_empty(len(rows), 0)
        first, positions = self._head.best(out[rows]), step.batch.positions[rows]
        return self._cache.continue_drafts(step, step.entries, first, hidden[rows], positions, self._forward)

    def _forward(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        out, hidden = self._head(ids, hidden, batch)
        return self._head.best(out), hidden
