"""Steps on a CPU as one graph, which is recorded as the engine starts and serves all steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.model.batch import Batch, KVGroup, split
from engine.model.ops.cpu.attention import latent_tiles, row_tiles
from engine.model.ops.cpu.graph import RUN_ALL, KernelGraph
from engine.model.ops.cpu.recurrent.sequences import SEQUENCE_NUMBERS, TABLE, sequence_table
from engine.model.state import StateBatch, StateCache

logger = logging.getLogger(__name__)

# Tokens of each sequence in the step that is recorded, and in the one that checks the replay, which are fewer, since
# memory may lack room for more. Where there are not as many states, the first sequences only.
RECORDED = 2, 1, 1, 2
REPLAYED = 1, 2

Forward = Callable[[Tensor, Batch], Tensor]


class StepGraph:
    """The model's layers with all kernels in one parallel region.

    Kernels read the sequences of a step, and how its rows are divided, from memory with fixed addresses; the number of
    tokens is written into the graph. So one recording serves steps that decode, steps that compute prompts, and
    mixtures of both.
    """

    def __init__(
        self,
        forward: Forward,
        x: Tensor,
        max_blocks: int,
        kv_caches: list[Tensor],
        kv_scales: list[Tensor | None],
        states: StateCache | None,
        latent_heads: int | None,
    ):
        """forward: returns hidden states [tokens, hidden] for embedded tokens [tokens, hidden] and their batch.
        x: [max_tokens, hidden], from which the graph reads embedded tokens; at least as many tokens as in RECORDED.
        max_blocks: KV blocks of the longest sequence. kv_caches, kv_scales: one per KV cache group. latent_heads: heads
        of latent attention; None in a model without it."""
        self._forward, self._x, max_tokens = forward, x, len(x)
        self._positions = torch.empty(max_tokens, dtype=torch.int64)
        self._kv_len = torch.empty(max_tokens, dtype=torch.int32)
        #: Per KV cache group, for the largest numbers of tokens and sequences.
        self._kv = [
            KVGroup(
                slot_mapping=torch.empty(max_tokens, dtype=torch.int64),
                block_table=torch.empty(max_tokens, max_blocks, dtype=torch.int32),
                kv_cache=kv_cache,
                kv_scales=scales,
            )
            for kv_cache, scales in zip(kv_caches, kv_scales, strict=True)
        ]
        self._tiles = torch.empty(1 + max_tokens, 4, dtype=torch.int64)
        self._states, self._sequences = states, torch.empty(1 + max_tokens, SEQUENCE_NUMBERS, dtype=torch.int64)
        self._latent_heads, self._latent_tiles = latent_heads, torch.empty_like(self._tiles)
        self._counts = RECORDED if states is None or not states.layers else RECORDED[: states.slots]
        self._graph = KernelGraph(sum(self._counts), max_tokens)
        RUN_ALL.compile(torch.int64)

    def run(self, x: Tensor, batch: Batch) -> Tensor:
        """Return hidden states [tokens, hidden], valid until the next step."""
        self._copy(x, batch)
        self._graph.replay(len(x))
        return self._hidden[: len(x)]

    def record(self) -> bool:
        """Record the kernels of the model. Returns False if some of its code is not our kernels. The KV cache must be
        empty."""
        recorded = self._record()
        for kv in self._kv:
            kv.kv_cache[0] = 0  # clear the block that these steps wrote to
        if not recorded:
            logger.info("steps run kernel by kernel, because some of this model's kernels are not Manta's")
        return recorded

    @torch.inference_mode()
    def _record(self) -> bool:
        """Record a step, then replay the graph for a step with other tokens and sequences. Return whether the result
        has the same bits as without the graph. The bits differ if the model uses code other than our kernels."""
        x, batch = self._example(self._counts)
        sequences = len(batch.kv_len)
        self._copy(x, batch)
        first, *others = [
            replace(kv, slot_mapping=kv.slot_mapping[: len(x)], block_table=kv.block_table[:sequences])
            for kv in self._kv
        ]
        fixed = replace(
            batch,
            positions=self._positions[: len(x)],
            slot_mapping=first.slot_mapping,
            kv_len=self._kv_len[:sequences],
            block_table=first.block_table,
            tiles=self._tiles,
            latent_tiles=self._latent_tiles,
            other_groups=tuple(others),
            states=None if batch.states is None else replace(batch.states, plans={TABLE: self._sequences}),
        )
        with self._graph:
            hidden = self._forward(self._x[: len(x)], fixed)
        if not self._graph.is_complete or hidden not in self._graph.memory:
            return False
        self._hidden = hidden.as_strided((len(self._x), hidden.shape[1]), hidden.stride())
        x, batch = self._example(REPLAYED[: len(self._counts)])
        replayed, expected = self.run(x, batch), self._forward(x, batch)
        return torch.equal(replayed.view(torch.uint8), expected.view(torch.uint8))  # also where a model gives NaN

    def _example(self, counts: Sequence[int]) -> tuple[Tensor, Batch]:
        """Return random hidden states [sum(counts), hidden], and a step of new sequences with counts[i] tokens each,
        one or two. All of them use the first block."""
        rows, lengths = torch.arange(sum(counts)), torch.tensor(counts, dtype=torch.int32)
        single, chunks = split(counts, counts)
        first, *others = [
            replace(
                kv,
                slot_mapping=rows.where(rows < kv.kv_cache.shape[4], -1),
                block_table=torch.zeros(len(counts), kv.block_table.shape[1], dtype=torch.int32),
            )
            for kv in self._kv
        ]
        batch = Batch(
            positions=rows % 2,
            slot_mapping=first.slot_mapping,
            query_start=torch.tensor([0, *counts]).cumsum(0).int(),
            kv_len=lengths,
            block_table=first.block_table,
            kv_cache=first.kv_cache,
            single=single,
            chunks=chunks,
            kv_scales=first.kv_scales,
            other_groups=tuple(others),
            states=self._example_states(len(counts)),
        )
        x = torch.randn(len(rows), self._x.shape[1], generator=torch.Generator().manual_seed(len(rows)))
        return x.to(self._x.dtype), batch

    def _example_states(self, sequences: int) -> StateBatch | None:
        """Return the states of new sequences, none of which is saved as a snapshot."""
        if self._states is None or not self._states.layers:
            return None
        none = torch.full((sequences,), -1, dtype=torch.int32)
        return StateBatch(self._states.layers, torch.arange(sequences, dtype=torch.int32), none, none)

    def _copy(self, x: Tensor, batch: Batch) -> None:
        """Copy a step's inputs to the memory that the graph reads."""
        tiles, tokens, (sequences, blocks) = row_tiles(batch), len(x), batch.block_table.shape
        self._x[:tokens] = x
        self._positions[:tokens], self._kv_len[:sequences] = batch.positions, batch.kv_len
        for group, fixed in enumerate(self._kv):
            kv = batch if group == 0 else batch.other_groups[group - 1]
            fixed.slot_mapping[:tokens], fixed.block_table[:sequences, :blocks] = kv.slot_mapping, kv.block_table
        self._tiles[: len(tiles)] = tiles
        if self._latent_heads is not None:
            tiles = latent_tiles(batch, self._latent_heads)
            self._latent_tiles[: len(tiles)] = tiles
        if batch.states is not None:
            table = sequence_table(batch)
            self._sequences[: len(table)] = table
