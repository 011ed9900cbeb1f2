"""Drafting with a smaller model of the same vocabulary, arXiv:2211.17192."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from engine.devices.device import copy_to
from engine.errors import ConfigError
from engine.model.batch import Batch, split
from engine.model.config import ModelConfig
from engine.model.models.registry import build_model
from engine.model.shard import ShardPlan
from engine.spec_decode.draft_cache import CachedDrafter
from engine.spec_decode.drafter import DraftInputs
from engine.spec_decode.target import Target, check_fits
from engine.wire.plan import StepPlan


class DraftModel(CachedDrafter):
    """A drafter that computes every sequence from its first token on, even tokens that the target did not have to
    compute. It computes cached or received prompts in steps of `max_num_batched_tokens` tokens, and drafts once it has
    caught up."""

    def __init__(self, folder: Path, target: Target, max_num_batched_tokens: int):
        cfg = ModelConfig.from_folder(folder)
        if cfg.head != "lm":
            raise ConfigError("speculative_config.model", str(folder), "a model that generates")
        if cfg.recurrent is not None or len(cfg.kv_groups) > 1:
            raise ConfigError("speculative_config.model", str(folder), "a model whose layers all keep KV of one shape")
        check_fits(folder, cfg.vocab_size, target.config)
        longest = max(cfg.max_position_embeddings, target.config.max_position_embeddings) + target.block_size
        cfg = replace(cfg, max_position_embeddings=longest, keeps_all_kv=True)
        super().__init__(cfg, target)
        self._model = build_model(cfg, ShardPlan(), target.dtype, target.device)
        target.load(self._model, folder)
        self._budget = max_num_batched_tokens
        self._computed: dict[int, int] = {}  # computed tokens by slot; the newest may be rejected drafts

    def follow(self, plan: StepPlan) -> None:
        super().follow(plan)
        self._computed |= {new.slot: 0 for new in plan.added}
        for slot, first in zip(plan.slots, plan.starts, strict=True):
            # a sequence that has caught up recomputes its newest token: the KV before that token is correct
            self._computed[slot] = min(self._computed.get(slot, 0), first)

    def _forward(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute a pass; see `Forward`. It does not use `hidden`, the hidden states of the previous pass."""
        hidden = self._model(ids, batch)
        return self._model.best(hidden)[1], hidden

    def propose(self, step: DraftInputs) -> Tensor:
        plan, newest = step.plan, step.last_rows
        spans = self._spans(step, self._budget)
        drafts = newest.new_full((len(step.entries), plan.num_drafts), -1)
        if not spans:
            return drafts
        hidden = self._model(*self._inputs(step, spans))
        # rows of the newest tokens of the sequences that have caught up
        first_rows = np.cumsum([0, *(stop - start for _, start, stop in spans)]).tolist()
        caught_up = {
            entry: row - start
            for row, (entry, start, stop) in zip(first_rows, spans, strict=False)
            if stop == plan.starts[entry] + plan.counts[entry] + 1
        }
        rows = [i for i, entry in enumerate(step.entries) if entry in caught_up]
        if not rows:
            return drafts
        entries = [step.entries[i] for i in rows]
        chosen = copy_to(rows, newest.device)
        positions = step.batch.positions[newest[chosen]] + 1
        offset = copy_to([caught_up[entry] for entry in entries], newest.device)
        last = hidden[positions + offset]
        first = self._model.best(last)[1]
        drafts[chosen] = self._cache.continue_drafts(step, entries, first, last, positions, self._forward)
        return drafts

    def _spans(self, step: DraftInputs, budget: int) -> list[tuple[int, int, int]]:
        """Return (entry of the plan, start, stop) for the tokens [start, stop) of each sequence to compute now. These
        are all known tokens, including those just sampled, that fit the budget and the blocks. The rest is computed
        later."""
        plan, spans = step.plan, []
        for entry, (slot, first, count) in enumerate(zip(plan.slots, plan.starts, plan.counts, strict=True)):
            start = self._computed[slot]
            stop = min(first + count + 1, start + budget, self._cache.capacity(step, entry))
            if start < stop:
                spans.append((entry, start, stop))
                self._computed[slot] = stop
                budget -= stop - start
        return spans

    def _inputs(self, step: DraftInputs, spans: list[tuple[int, int, int]]) -> tuple[Tensor, Batch]:
        entries, starts, stops = (np.array(column) for column in zip(*spans, strict=True))
        counts = stops - starts
        query_start = np.concatenate([[0], np.cumsum(counts)])
        seq = np.repeat(np.arange(len(spans)), counts)
        position = np.arange(query_start[-1]) + (starts - query_start[:-1])[seq]
        single, chunks = split(counts.tolist(), stops.tolist())
        device = step.last_rows.device
        positions, seqs = (copy_to(x, device) for x in (position, seq))
        slots = copy_to([step.plan.slots[entry] for entry in entries], device)
        tables = step.tables.index_select(0, copy_to(entries, device))
        size = self._cache.block_size
        batch = Batch(
            positions=positions,
            slot_mapping=tables[seqs, positions // size].long() * size + positions % size,
            query_start=copy_to(query_start.astype(np.int32), device),
            kv_len=copy_to(stops.astype(np.int32), device),
            block_table=tables,
            kv_cache=self._cache.kv,
            single=copy_to(single.numpy(), device),
            chunks=chunks,
        )
        return step.history[slots[seqs], positions].long(), batch
