"""Decode steps of few sequences on a CPU, as graphs: one for each number of sequences, recorded when it first comes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops.cpu.attention import row_tiles
from engine.model.ops.cpu.graph import RUN_ALL, Graph, Memory

logger = logging.getLogger(__name__)

MAX_SEQUENCES = 64  # as many rows as our linear layers take


@dataclass(frozen=True, slots=True)
class Decode:
    graph: Graph
    x: Tensor
    batch: Batch
    hidden: Tensor

    def run(self, x: Tensor, batch: Batch) -> Tensor:
        self.x.copy_(x)
        self.batch.positions.copy_(batch.positions)
        self.batch.slot_mapping.copy_(batch.slot_mapping)
        self.batch.kv_len.copy_(batch.kv_len)
        self.batch.block_table[:, : batch.block_table.shape[1]] = batch.block_table
        self.graph.replay()
        return self.hidden


class CpuDecodeGraphs:
    """Computes what `forward` does, with its kernels in one parallel region where that is possible."""

    def __init__(self, forward: Callable[[Tensor, Batch], Tensor], max_blocks: int):
        """forward: embedded tokens [tokens, hidden] and their batch -> hidden states [tokens, hidden].
        max_blocks: KV blocks of the longest sequence."""
        self._forward, self._max_blocks = forward, max_blocks
        self._memory = Memory()
        self._decodes: dict[int, Decode] = {}
        self._recordable = True
        RUN_ALL.compile(torch.int64)

    @property
    def recorded(self) -> list[int]:
        """Numbers of sequences that have a graph."""
        return sorted(self._decodes)

    def run(self, x: Tensor, batch: Batch) -> Tensor:
        """Return hidden states [tokens, hidden], valid until the next step."""
        if batch.chunks or len(x) > MAX_SEQUENCES or not self._recordable:
            return self._forward(x, batch)
        decode = self._decodes.get(len(x))
        if decode is None:
            return self._record(x, batch)
        return decode.run(x, batch)

    def _record(self, x: Tensor, batch: Batch) -> Tensor:
        """Run this step as usual, and record it, if then a replay has the same bits: only kernels of ours are replayed.

        What is recorded is another step, at the start of its sequences, so that what is missing in a replay shows.
        """
        count, graph = len(x), Graph(self._memory)
        own = Batch(
            positions=torch.zeros(count, dtype=torch.int64),
            slot_mapping=batch.slot_mapping.clone(),
            query_start=batch.query_start,
            kv_len=torch.ones(count, dtype=torch.int32),
            block_table=torch.zeros(count, self._max_blocks, dtype=torch.int32),
            kv_cache=batch.kv_cache,
            single=batch.single,
            chunks=[],
            tiles=row_tiles(batch),
            kv_scales=batch.kv_scales,
        )
        inputs = x.roll(1, -1)
        with graph:
            decode = Decode(graph, inputs, own, self._forward(inputs, own))
        replayed, hidden = decode.run(x, batch), self._forward(x, batch)
        if torch.equal(replayed, hidden):
            self._decodes[count] = decode
        else:
            self._recordable = False
            logger.info("decode steps run kernel by kernel: not all of this model's are ours")
        return hidden
