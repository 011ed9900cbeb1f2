"""Builds the inputs of a step on the host. Needs no result of earlier steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch

from engine.devices.device import Device, StagedCopy
from engine.engine_options import EngineOptions
from engine.model.batch import Batch, KVGroup, chunks_of, split_rows
from engine.model.config import ModelConfig
from engine.model.ops import dispatch
from engine.runner.layer_runner import LayerRunner
from engine.runner.logits_processors import COUNTERS, LogitsEdits
from engine.runner.rank_part import NO_PARTS, RankParts
from engine.runner.sampler import MaskedRows, SampledRow, SamplingInputs, UniformSource, prepare_sampling
from engine.runner.step import NewTokens, PromptLogprobRows, StepInputs, StepMemory
from engine.runner.step_layout import BatchRows, SampledTokens, StepLayout
from engine.wire.plan import NewSequence, SampledStep, StepPlan

NOTHING_SAMPLED: tuple[list[int], SamplingInputs] = ([], SamplingInputs([], None))


class InputBuilder:
    """Builds the inputs of steps. Keeps the sequence in each slot, and its block tables."""

    def __init__(
        self,
        config: EngineOptions,
        model_config: ModelConfig,
        device: Device,
        memory: StepMemory,
        layers: LayerRunner,
        parts: RankParts = NO_PARTS,
    ):
        """layers: computes the steps."""
        self._device, self._memory, self._layers, self._prepare = device, memory, layers, parts.prepare
        self._needs_batch = any(part.needs_batch for part in parts.all)
        self._block_size, self._max_model_len = memory.kv_caches[0].shape[4], memory.history.shape[1]
        self._vocab_size = model_config.vocab_size
        slots = config.max_num_seqs
        shape = len(memory.kv_caches), slots, -(-self._max_model_len // self._block_size)
        self.block_tables = np.zeros(shape, dtype=np.int32)  # [groups, slots, blocks of a sequence]
        self._tables = list(self.block_tables)
        self._sequences: dict[int, NewSequence] = {}  # by slot
        self._prompt_logprobs: set[int] = set()  # slots of sequences whose prompt logprobs are requested
        self._eos = model_config.eos_token_ids
        self._edits: list[LogitsEdits | None] = [None] * slots
        self._plain = np.zeros(slots, dtype=bool)  # sequences that need nothing but their most likely token
        self._uniform = UniformSource()
        #: Slots and inputs of the last step that sampled at random, until a sequence is added. The next step mostly
        #: needs only new random numbers.
        self._sampled = NOTHING_SAMPLED
        own_kernel = dispatch.gpu_kernels(torch.float32, device.torch_device)  # which needs no counters of tokens
        self._counters = sys.maxsize if own_kernel else COUNTERS

    def build(self, plan: StepPlan, sampled: Sequence[SampledStep] = ()) -> StepInputs:
        """Return the inputs of a step. sampled: tokens of earlier steps that another rank has sampled."""
        staged = self._device.staged_copy()
        added = [self._add(sequence, staged) for sequence in plan.added]
        for change in plan.blocks:
            table = self._tables[change.group][change.slot]
            table[change.index : change.index + len(change.blocks)] = change.blocks
        layout = StepLayout.of(plan, self._tables, self._block_size, self._max_model_len)
        of = {name: needed for name, prepare in self._prepare if (needed := prepare(plan, layout, staged)) is not None}
        sequences, query_start, first_sequences = layout.sequences, layout.query_start, None
        width = -(-(int(sequences.ends.max()) + plan.num_drafts) // self._block_size)
        if plan.drafts and self._layers.divides_drafts and layout.divides_drafts:
            sequences, first = sequences.divided(np.isin(np.arange(len(plan.slots)), list(plan.drafts)))
            query_start, first_sequences = np.concatenate([[0], np.cumsum(sequences.counts)]), staged.add(first)
        rows = BatchRows(sequences, query_start, width)
        prepared = self._layers.prepare(plan, layout, rows, self.block_tables, staged)
        batch = None
        if prepared.needs_batch or self._needs_batch:
            batch = self._batch(layout, rows, prepared.all_chunks, staged)
        drawn, last = SampledTokens.of(plan, layout), self._max_model_len - 1
        return StepInputs(
            plan=plan,
            staged=staged,
            batch=batch,
            prepared=prepared,
            token_index=staged.add(layout.token_index),
            first_sequences=first_sequences,
            added=added,
            entries=drawn.entries,
            sampled_rows=staged.add(drawn.rows),
            written=staged.add(drawn.slots * self._max_model_len + np.minimum(drawn.positions, last)),
            sampling=self._sampling(plan, drawn.slots, drawn.entries, drawn.positions, staged),
            prompt_logprob_rows=self._prompt_logprob_rows(plan, layout.query_start, staged),
            sampled=sampled,
            of=of,
        )

    def _batch(self, layout: StepLayout, rows: BatchRows, all_chunks: bool, staged: StagedCopy) -> Batch:
        sequences = rows.sequences
        single, chunks = split_rows(sequences.counts, sequences.ends, all_chunks=all_chunks)
        slots: np.ndarray | list[int] = [] if self._layers.keeps_tables else sequences.slots
        first, *others = [
            KVGroup(
                slot_mapping=staged.add(slot_mapping),
                block_table=staged.add(table[slots, : rows.width]),
                kv_cache=cache,
                kv_scales=scales,
            )
            for slot_mapping, table, cache, scales in zip(
                layout.slot_mappings, self._tables, self._memory.kv_caches, self._memory.kv_scales, strict=True
            )
        ]
        return Batch(
            positions=staged.add(layout.positions),
            slot_mapping=first.slot_mapping,
            query_start=staged.add(rows.query_start.astype(np.int32)),
            kv_len=staged.add(sequences.ends.astype(np.int32)),
            block_table=first.block_table,
            kv_cache=first.kv_cache,
            single=staged.add(single),
            chunks=chunks_of(chunks),
            kv_scales=first.kv_scales,
            other_groups=tuple(others),
        )

    def _add(self, sequence: NewSequence, staged: StagedCopy) -> NewTokens:
        params, edits = sequence.params, LogitsEdits.of(sequence.params, self._eos)
        self._sequences[sequence.slot], self._edits[sequence.slot] = sequence, edits
        self._sampled = NOTHING_SAMPLED
        self._plain[sequence.slot] = params.greedy and params.logprobs is None and edits is None
        self._prompt_logprobs.discard(sequence.slot)
        if params.prompt_logprobs is not None:
            self._prompt_logprobs.add(sequence.slot)
        return NewTokens(sequence.slot, staged.add(np.array(sequence.tokens, dtype=np.int32)))

    def _sampling(
        self, plan: StepPlan, slots: np.ndarray, entries: list[int], sampled: np.ndarray, staged: StagedCopy
    ) -> SamplingInputs:
        """Prepare the sampling of a step. slots, entries, sampled: [n], the slot, plan entry and position of each token
        to sample."""
        sampled_slots = slots.tolist()
        if self._plain[slots].all():
            inputs = SamplingInputs([], None)
        elif self._sampled[0] == sampled_slots:
            seeds = [self._sequences[slot].seed for slot in sampled_slots]
            inputs = self._sampled[1].again(list(map(self._uniform.draw, seeds, sampled.tolist())), staged.add)
        else:
            rows = []
            for slot, position in zip(sampled_slots, sampled.tolist(), strict=True):
                new = self._sequences[slot]
                rows.append(SampledRow(slot, position, new.num_prompt, new.seed, new.params, self._edits[slot]))
            inputs = prepare_sampling(rows, self._vocab_size, self._uniform, staged.add, counters=self._counters)
            self._sampled = NOTHING_SAMPLED if any(row.edits for row in rows) else (sampled_slots, inputs)
        if plan.masked:
            inputs.masked = self._masked_rows(plan, entries, staged)
        return inputs

    def _masked_rows(self, plan: StepPlan, entries: list[int], staged: StagedCopy) -> MaskedRows:
        rows = np.flatnonzero(np.isin(entries, plan.masked))
        allowed = np.frombuffer(plan.masks, dtype=np.uint8).reshape(len(rows), -1)
        return MaskedRows(staged.add(rows), staged.add(allowed.copy()))  # torch warns of read-only arrays

    def _prompt_logprob_rows(
        self, plan: StepPlan, query_start: np.ndarray, staged: StagedCopy
    ) -> list[PromptLogprobRows]:
        rows: list[PromptLogprobRows] = []
        if not self._prompt_logprobs:
            return rows
        for i, (slot, start, count) in enumerate(zip(plan.slots, plan.starts, plan.counts, strict=True)):
            sequence = self._sequences[slot]
            stop = min(start + count, sequence.num_prompt - 1)
            if sequence.params.prompt_logprobs is not None and start < stop:
                targets = slot * self._max_model_len + np.arange(start + 1, stop + 1)
                count = sequence.params.prompt_logprobs
                rows.append(PromptLogprobRows(i, int(query_start[i]), staged.add(targets), count))
        return rows
