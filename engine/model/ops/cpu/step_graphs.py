"""Steps of few tokens on a CPU, as graphs: one for each way in which sequences share the tokens of a step."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops.cpu.attention import row_tiles
from engine.model.ops.cpu.graph import RUN_ALL, Graph, Memory

logger = logging.getLogger(__name__)

MAX_GRAPHS = 64


@dataclass(frozen=True, slots=True)
class Step:
    """A recorded step and its inputs, whose addresses stay."""

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


class StepGraphs:
    """Computes what `forward` does, with its kernels in one parallel region where that is possible."""

    def __init__(self, forward: Callable[[Tensor, Batch], Tensor], max_tokens: int, max_blocks: int):
        """forward: embedded tokens [tokens, hidden] and their batch -> hidden states [tokens, hidden].
        max_tokens: larger steps are not recorded. max_blocks: KV blocks of the longest sequence."""
        self._forward, self._max_tokens, self._max_blocks = forward, max_tokens, max_blocks
        self._memory = Memory()
        # by the number of tokens of each sequence, the last used last; None if they came only once so far
        self._steps: OrderedDict[tuple[int, ...], Step | None] = OrderedDict()
        self._recordable = True
        RUN_ALL.compile(torch.int64)

    @property
    def recorded(self) -> set[tuple[int, ...]]:
        """Numbers of tokens of each sequence, in the steps that have a graph."""
        return {counts for counts, step in self._steps.items() if step is not None}

    def run(self, x: Tensor, batch: Batch) -> Tensor:
        """Return hidden states [tokens, hidden], valid until the next step."""
        if len(x) > self._max_tokens or not self._recordable:
            return self._forward(x, batch)
        counts = tuple(batch.query_start.diff().tolist())
        if counts not in self._steps:
            self._steps[counts] = None
            if len(self._steps) > MAX_GRAPHS:
                self._steps.popitem(last=False)
            return self._forward(x, batch)
        self._steps.move_to_end(counts)
        step = self._steps[counts]
        return self._record(counts, x, batch) if step is None else step.run(x, batch)

    def _record(self, counts: tuple[int, ...], x: Tensor, batch: Batch) -> Tensor:
        """Run this step as usual, and record it, if then a replay has the same bits: only kernels of ours are replayed.

        What is recorded is another step, of the same shape at the start of its sequences, or one token after it where
        the real one is there. So whatever a replay lacks shows.
        """
        inputs, lengths = x.roll(1, -1), torch.tensor(counts, dtype=torch.int32)
        room = (self._max_blocks - 1) * batch.kv_cache.shape[4]
        later = (batch.kv_len == lengths) & (lengths < room)
        own = Batch(
            positions=torch.cat([torch.arange(n) + k for n, k in zip(counts, later.tolist(), strict=True)]),
            slot_mapping=batch.slot_mapping.clone(),
            query_start=batch.query_start.clone(),
            kv_len=lengths + later,
            block_table=torch.zeros(len(counts), self._max_blocks, dtype=torch.int32),
            kv_cache=batch.kv_cache,
            single=batch.single.clone(),
            chunks=[replace(chunk, kv_len=chunk.count) for chunk in batch.chunks],
            tiles=row_tiles(batch),
            kv_scales=batch.kv_scales,
        )
        graph = Graph(self._memory)
        with graph:
            step = Step(graph, inputs, own, self._forward(inputs, own))
        replayed, hidden = step.run(x, batch), self._forward(x, batch)
        if torch.equal(replayed.view(torch.uint8), hidden.view(torch.uint8)):  # also where a model gives NaN
            self._steps[counts] = step
        else:
            self._recordable = False
            logger.info("steps run kernel by kernel: not all of this model's are ours")
        return hidden
