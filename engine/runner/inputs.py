"""Builds the inputs of a step on the host. Needs no result of earlier steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.device import Device, StagedCopy
from engine.model.batch import Batch, KVGroup, chunks_of, split_rows
from engine.model.config import ModelConfig
from engine.model.low_rank import row_table
from engine.model.ops import dispatch
from engine.runner.cuda_graphs import StepShape, UnpaddedStep
from engine.runner.images import EmbeddingRows, NoSlotImages, SlotImages
from engine.runner.logits_processors import COUNTERS, LogitsEdits
from engine.runner.pooler import PooledRows
from engine.runner.sampler import MaskedRows, SampledRow, SamplingInputs, UniformSource, prepare_sampling
from engine.runner.step_layout import SampledTokens, Sequences, StepLayout
from engine.runner.step_memory import StepMemory
from engine.wire.plan import ON_DEVICE, NewSequence, StepPlan
from engine.wire.pooling_params import PoolingParams

NOTHING_SAMPLED: tuple[list[int], SamplingInputs] = ([], SamplingInputs([], None))


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens of a sequence that is new in this step."""

    slot: int
    tokens: Tensor  #: [n] int32


@dataclass(frozen=True, slots=True)
class KeptDrafts:
    """Draft tokens that only the device knows."""

    index: Tensor  #: [n] int64, their places in `DraftedTokens.tokens`
    source: Tensor  #: [n] int64, where they are in the flattened proposals [slots, num_speculative_tokens]


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """Draft tokens that this step verifies."""

    written: Tensor  #: [n] int64, where they go in the flattened history
    tokens: Tensor  #: [n] int32
    kept: KeptDrafts | None  #: those of `tokens` that are filled in on the device; None if there are none


@dataclass(frozen=True, slots=True)
class PromptLogprobRows:
    """Rows of hidden states from which the log-probabilities of one sequence's prompt tokens are computed."""

    entry: int  #: index in the plan
    first_row: int
    targets: Tensor  #: [rows] int64, the token that follows each row, as an index into the flattened history
    count: int  #: alternatives to report


@dataclass(frozen=True, slots=True)
class BlockTableRows:
    """The rows that a batch takes from the device's block tables [groups, slots, blocks] int32, and the changes to
    apply to the tables first."""

    rows: Tensor  #: [seqs] int64
    width: int  #: entries of each row that the batch needs
    index: Tensor  #: [n] int64, changed entries of the flattened tables of all groups
    blocks: Tensor  #: [n] int32, their new values

    def apply(self, tables: Tensor) -> None:
        """Apply the changes."""
        if len(self.index):
            tables.view(-1)[self.index] = self.blocks

    def give(self, tables: Tensor, batch: Batch) -> None:
        """Give the batch its rows."""
        batch.set_block_tables(tables[:, :, : self.width].index_select(1, self.rows).unbind())


class NoTableRows:
    """Stand-in for BlockTableRows on a CPU, where a batch has its block tables from the start."""

    def apply(self, tables: Tensor) -> None:
        pass

    def give(self, tables: Tensor, batch: Batch) -> None:
        pass


NO_TABLE_ROWS = NoTableRows()


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All inputs of a step. Its tensors are valid only once `staged` has been sent."""

    plan: StepPlan
    staged: StagedCopy
    batch: Batch | None
    """None if only a graph computes the step. Has no block tables if the device keeps them: `block_tables` then selects
    their rows."""
    graph: tuple[StepShape, Tensor] | None
    """The graph's shape and its inputs from `cuda_graphs.pad_step`; None for a step without a graph."""
    unpadded: UnpaddedStep | None
    """What a graph of any shape needs; None if no graph can compute this step."""
    block_tables: BlockTableRows | NoTableRows
    token_index: Tensor
    """[tokens] int64, indices of the input tokens in the flattened history. The history is read only when the step
    runs, because the step before may still have to sample some of them."""
    first_sequences: Tensor | None
    """[entries of the plan] int64, each entry's first sequence in the batch; None if each is one sequence."""
    added: list[NewTokens]
    drafted: DraftedTokens | None
    entries: list[int]  #: the plan's entry of each sampled token; one with drafts is repeated for each of its tokens
    sampled_rows: Tensor  #: [sampled tokens] int64, their rows of hidden states
    written: Tensor  #: [sampled tokens] int64, where they go in the flattened history
    sampling: SamplingInputs
    prompt_logprob_rows: list[PromptLogprobRows]
    pooled_rows: list[PooledRows]
    image_rows: EmbeddingRows | None
    adapter_rows: Tensor | None
    """The adapter of each token, from `row_table`; None if no token has an adapter."""
    received_blocks: list[Tensor]  #: [n] int64 each, of the inbox, of each image in `plan.received`
    rotary_positions: Tensor | None
    """[tokens] int64, or [3, tokens] if some are in images; None if they equal the batch's positions."""

    def as_graph(self, shape: StepShape) -> StepInputs:
        """Return the inputs of the same step for a graph of this shape. Call it before `staged` is sent."""
        assert self.unpadded is not None, "no graph can compute this step"
        rows = split_rows(self.unpadded.counts, self.unpadded.kv_len, all_chunks=shape.verified > 0)
        return replace(self, graph=(shape, self.staged.add(self.unpadded.pad(shape, *rows))))


class InputBuilder:
    """Builds the inputs of steps. Keeps the sequence in each slot, and its block tables."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        device: Device,
        memory: StepMemory,
        max_model_len: int,
        shape_for: Callable[[int, int, int], StepShape | None] = lambda tokens, seqs, longest: None,
        drafts: bool = False,
        adapter_tile_rows: int = 1,
    ):
        """shape_for: returns the graph's shape for a step of (tokens, sequences, tokens of the longest sequence), or
        None if no graph fits. drafts: whether a drafter with weights runs after each step; if so, a batch is built even
        for steps that run as a graph."""
        self._device, self._shape_for, self._drafts, self._memory = device, shape_for, drafts, memory
        self._block_size, self._max_model_len = memory.kv_caches[0].shape[4], max_model_len
        self._vocab_size = model_config.vocab_size
        # a GPU reads the KV of a sequence once for all its rows, and a recurrent state runs through them
        self._divides_drafts = not device.asynchronous and model_config.recurrent is None
        self._adapter_tile_rows = adapter_tile_rows
        self._max_drafts = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
        slots = config.max_num_seqs
        self._adapters = np.full(slots, -1, dtype=np.int32)  # slots of their adapters, of the sequences in these slots
        shape = len(memory.kv_caches), slots, -(-max_model_len // self._block_size)
        self.block_tables = np.zeros(shape, dtype=np.int32)  # [groups, slots, blocks of a sequence]
        self._tables = list(self.block_tables)
        self._sequences: dict[int, NewSequence] = {}  # by slot
        self._pooling: dict[int, PoolingParams] = {}  # by slot, for sequences that are pooled
        self._prompt_logprobs: set[int] = set()  # slots of sequences whose prompt logprobs are requested
        self._eos = model_config.eos_token_ids
        self._images = SlotImages(model_config.vision, slots) if model_config.vision else NoSlotImages()
        self._edits: list[LogitsEdits | None] = [None] * slots
        self._plain = np.zeros(slots, dtype=bool)  # sequences that need nothing but their most likely token
        self._uniform = UniformSource()
        #: Slots and inputs of the last step that sampled at random, until a sequence is added. The next step mostly
        #: needs only new random numbers.
        self._sampled = NOTHING_SAMPLED
        own_kernel = dispatch.gpu_kernels(torch.float32, device.torch_device)  # which needs no counters of tokens
        self._counters = sys.maxsize if own_kernel else COUNTERS

    def build(self, plan: StepPlan) -> StepInputs:
        staged = self._device.staged_copy()
        added = [self._add(sequence, staged) for sequence in plan.added]
        for change in plan.blocks:
            table = self._tables[change.group][change.slot]
            table[change.index : change.index + len(change.blocks)] = change.blocks
        layout = StepLayout.of(plan, self._tables, self._block_size, self._max_model_len)
        query_start, positions = layout.query_start, layout.positions
        sequences, first_rows, first_sequences = layout.sequences, query_start, None
        width = -(-(int(sequences.ends.max()) + plan.num_drafts) // self._block_size)
        if plan.drafts and self._divides_drafts:
            sequences, first = sequences.divided(np.isin(np.arange(len(plan.slots)), list(plan.drafts)))
            first_rows, first_sequences = np.concatenate([[0], np.cumsum(sequences.counts)]), staged.add(first)
        image_rows, rotary = self._images.place(plan, layout, staged)
        unpadded = None
        if self._device.asynchronous and image_rows is None and rotary.ndim == 1:
            unpadded = self._unpadded(plan, layout, sequences, first_rows, rotary)
        batch, graph = self._batch(plan, layout, sequences, first_rows, unpadded, width, staged)
        if batch is not None and self._pooling:
            batch.token_types = self._token_types(plan, positions, layout.entry, staged)
        sampled, last = SampledTokens.of(plan, layout, self._pooling), self._max_model_len - 1
        tables = self._device.asynchronous
        return StepInputs(
            plan=plan,
            staged=staged,
            batch=batch,
            graph=graph,
            unpadded=unpadded,
            block_tables=self._block_table_rows(plan, sequences.slots, width, staged) if tables else NO_TABLE_ROWS,
            token_index=staged.add(layout.token_index),
            first_sequences=first_sequences,
            added=added,
            drafted=self._drafted(plan, layout.sequences.ends, staged) if plan.drafts else None,
            entries=sampled.entries,
            sampled_rows=staged.add(sampled.rows),
            written=staged.add(sampled.slots * self._max_model_len + np.minimum(sampled.positions, last)),
            sampling=self._sampling(plan, sampled.slots, sampled.entries, sampled.positions, staged),
            prompt_logprob_rows=self._prompt_logprob_rows(plan, query_start, staged),
            pooled_rows=self._pooled_rows(plan, query_start) if self._pooling else [],
            image_rows=image_rows,
            adapter_rows=self._adapter_rows(layout, staged),
            received_blocks=[staged.add(np.array(image.blocks, dtype=np.int64)) for image in plan.received],
            rotary_positions=None if rotary is positions else staged.add(rotary),
        )

    def _unpadded(
        self, plan: StepPlan, layout: StepLayout, sequences: Sequences, first_rows: np.ndarray, rotary: np.ndarray
    ) -> UnpaddedStep:
        """Return what a graph of any shape needs. The arguments are those of `_batch`. rotary: [tokens]."""
        return UnpaddedStep(
            token_index=layout.token_index,
            positions=rotary,
            slot_mappings=layout.slot_mappings,
            slots=sequences.slots,
            counts=sequences.counts,
            kv_len=sequences.ends,
            query_start=first_rows,
            saves=self._memory.states.saves(sequences.slots, plan.saved) if plan.saved else None,
        )

    def _batch(
        self,
        plan: StepPlan,
        layout: StepLayout,
        sequences: Sequences,
        first_rows: np.ndarray,
        unpadded: UnpaddedStep | None,
        width: int,
        staged: StagedCopy,
    ) -> tuple[Batch | None, tuple[StepShape, Tensor] | None]:
        """Return the batch of a step, and the shape and input buffer of its graph. The graph is None if none fits.
        The batch is None if the step runs as a graph and no drafter needs the batch.

        first_rows: [sequences + 1], the first token of each sequence, and the number of tokens. width: blocks of the
        longest sequence.
        """
        graph = None
        shape = None if unpadded is None else self._shape_for(*unpadded.size)
        verifies = shape is not None and shape.verified > 0
        single, chunks = split_rows(sequences.counts, sequences.ends, all_chunks=verifies)
        if unpadded is not None and shape is not None:
            graph = shape, staged.add(unpadded.pad(shape, single, chunks))
            if not self._drafts:
                return None, graph
        first, *others = [
            KVGroup(
                slot_mapping=staged.add(slot_mapping),
                block_table=staged.add(table[[] if self._device.asynchronous else sequences.slots, :width]),
                kv_cache=cache,
                kv_scales=scales,
            )
            for slot_mapping, table, cache, scales in zip(
                layout.slot_mappings, self._tables, self._memory.kv_caches, self._memory.kv_scales, strict=True
            )
        ]
        batch = Batch(
            positions=staged.add(layout.positions),
            slot_mapping=first.slot_mapping,
            query_start=staged.add(first_rows.astype(np.int32)),
            kv_len=staged.add(sequences.ends.astype(np.int32)),
            block_table=first.block_table,
            kv_cache=first.kv_cache,
            single=staged.add(single),
            chunks=chunks_of(chunks),
            kv_scales=first.kv_scales,
            other_groups=tuple(others),
            states=self._memory.states.batch(sequences.slots, staged, plan.saved),
        )
        return batch, graph

    def _add(self, sequence: NewSequence, staged: StagedCopy) -> NewTokens:
        params, edits = sequence.params, LogitsEdits.of(sequence.params, self._eos)
        self._sequences[sequence.slot], self._edits[sequence.slot] = sequence, edits
        self._sampled = NOTHING_SAMPLED
        self._plain[sequence.slot] = params.greedy and params.logprobs is None and edits is None
        self._prompt_logprobs.discard(sequence.slot)
        if params.prompt_logprobs is not None:
            self._prompt_logprobs.add(sequence.slot)
        self._images.add(sequence)
        self._adapters[sequence.slot] = sequence.adapter
        self._pooling.pop(sequence.slot, None)
        if sequence.pooling is not None:
            self._pooling[sequence.slot] = sequence.pooling
        return NewTokens(sequence.slot, staged.add(np.array(sequence.tokens, dtype=np.int32)))

    def _adapter_rows(self, layout: StepLayout, staged: StagedCopy) -> Tensor | None:
        of_sequences = self._adapters[layout.sequences.slots]
        if of_sequences.max(initial=-1) < 0:
            return None
        return staged.add(row_table(of_sequences[layout.entry], self._adapter_tile_rows))

    def _block_table_rows(self, plan: StepPlan, slots: np.ndarray, width: int, staged: StagedCopy) -> BlockTableRows:
        _, slots_of_group, entries = self.block_tables.shape
        ranges = [
            (c.group * slots_of_group + c.slot) * entries + np.arange(c.index, c.index + len(c.blocks))
            for c in plan.blocks
        ]
        index = np.concatenate(ranges) if ranges else np.empty(0, dtype=np.int64)
        # final values, since an entry may change twice and the device writes in any order
        blocks = self.block_tables.reshape(-1)[index]
        return BlockTableRows(staged.add(slots), width, staged.add(index), staged.add(blocks))

    def _drafted(self, plan: StepPlan, ends: np.ndarray, staged: StagedCopy) -> DraftedTokens:
        ranges = [
            plan.slots[i] * self._max_model_len + np.arange(ends[i] - len(drafts), ends[i])
            for i, drafts in plan.drafts.items()
        ]
        tokens = np.concatenate([np.array(drafts, dtype=np.int32) for drafts in plan.drafts.values()])
        kept = self._kept(plan, np.flatnonzero(tokens == ON_DEVICE), staged) if self._drafts else None
        return DraftedTokens(staged.add(np.concatenate(ranges)), staged.add(tokens), kept)

    def _kept(self, plan: StepPlan, index: np.ndarray, staged: StagedCopy) -> KeptDrafts | None:
        """Find the drafts of a plan that only the device knows. index: [n], their places among all drafts."""
        if not len(index):
            return None
        places = [plan.slots[i] * self._max_drafts + np.arange(len(drafts)) for i, drafts in plan.drafts.items()]
        return KeptDrafts(staged.add(index), staged.add(np.concatenate(places)[index]))

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

    def _pooled_rows(self, plan: StepPlan, query_start: np.ndarray) -> list[PooledRows]:
        columns = zip(plan.slots, query_start.tolist(), plan.starts, plan.counts, plan.samples, strict=False)
        return [
            PooledRows(i, slot, row, start, count, is_last, self._pooling[slot])
            for i, (slot, row, start, count, is_last) in enumerate(columns)
            if slot in self._pooling
        ]

    def _token_types(
        self, plan: StepPlan, positions: np.ndarray, entry: np.ndarray, staged: StagedCopy
    ) -> Tensor | None:
        firsts = [self._pooling[s].token_types_from if s in self._pooling else None for s in plan.slots]
        if not any(firsts):
            return None
        first = np.array([self._max_model_len if first is None else first for first in firsts])
        return staged.add((positions >= first[entry]).astype(np.int64))

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
