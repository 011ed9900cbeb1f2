"""Builds the inputs of a step on the host. Needs no result of earlier steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.devices.device import Device, StagedCopy
from engine.engine_options import EngineOptions
from engine.model.batch import Batch, KVGroup, chunks_of, split_rows
from engine.model.config import ModelConfig
from engine.runner.layer_runner import LayerRunner
from engine.runner.rank_part import NO_PARTS, RankParts
from engine.runner.sampler import SampledRow, SamplingInputs, UniformSource, prepare_sampling
from engine.runner.step import NewTokens, PromptLogprobRows, StepInputs, StepMemory
from engine.runner.step_layout import BatchRows, SampledTokens, StepLayout
from engine.wire.plan import NewSequence, SampledStep, StepPlan

NOTHING_SAMPLED: tuple[list[int], SamplingInputs] = ([], SamplingInputs([]))


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
        self._device, self._memory, self._layers = device, memory, layers
        self._prepare, self._edits = parts.prepare, parts.edits
        self._needs_batch = any(part.needs_batch for part in parts.all)
        self._block_size, self._max_model_len = memory.kv_caches[0].shape[4], memory.history.shape[1]
        self._vocab_size = model_config.vocab_size
        slots = config.max_num_seqs
        shape = len(memory.kv_caches), slots, -(-self._max_model_len // self._block_size)
        self.block_tables = np.zeros(shape, dtype=np.int32)  # [groups, slots, blocks of a sequence]
        self._tables = list(self.block_tables)
        self._sequences: dict[int, NewSequence] = {}  # by slot
        self._prompt_logprobs: set[int] = set()  # slots of sequences whose prompt logprobs are requested
        self._plain = np.zeros(slots, dtype=bool)  # sequences that need nothing but their most likely token
        self._uniform = UniformSource()
        #: Slots and inputs of the last step that sampled at random, until a sequence is added. The next step mostly
        #: needs only new random numbers.
        self._sampled = NOTHING_SAMPLED

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
            edits=[edit for edits in self._edits if (edit := edits(plan, drawn, staged)) is not None],
            sampling=self._sampling(drawn, staged),
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
        params, self._sequences[sequence.slot] = sequence.params, sequence
        self._sampled = NOTHING_SAMPLED
        self._plain[sequence.slot] = params.greedy and params.logprobs is None
        self._prompt_logprobs.discard(sequence.slot)
        if params.prompt_logprobs is not None:
            self._prompt_logprobs.add(sequence.slot)
        return NewTokens(sequence.slot, staged.add(np.array(sequence.tokens, dtype=np.int32)))

    def _sampling(self, drawn: SampledTokens, staged: StagedCopy) -> SamplingInputs:
        """Prepare the sampling of a step."""
        if self._plain[drawn.slots].all():
            return SamplingInputs([])
        slots, positions = drawn.slots.tolist(), drawn.positions.tolist()
        sequences = [self._sequences[slot] for slot in slots]
        if self._sampled[0] == slots:
            uniform = [self._uniform.draw(new.seed, at) for new, at in zip(sequences, positions, strict=True)]
            return self._sampled[1].again(uniform, staged.add)
        rows = [SampledRow(at, new.seed, new.params) for new, at in zip(sequences, positions, strict=True)]
        self._sampled = slots, prepare_sampling(rows, self._vocab_size, self._uniform, staged.add)
        return self._sampled[1]

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
