"""Runs steps as CUDA graphs: a step replays a graph that was captured for its number of tokens or a few more.

A step is hundreds of short kernels, which the host cannot launch as fast as a GPU runs them; a replay is one launch. A
graph repeats the same kernels on the same memory, so there is a graph for each of a few shapes. Inputs are in buffers
that never move, and a step that is smaller than its shape is padded. Some graphs are for steps that only decode, as in
vLLM and nano-vLLM, some for steps that verify drafts, and some for steps that also compute chunks of prompts. The tiles
into which attention cuts drafts and chunks are one more input.

Padding consists of tokens that belong to no sequence and have no slot for their KV (-1); of sequences without tokens
(kv_len 0); of entries of `Batch.single` that name no sequence (-1); and of tiles without rows. Padding reads and writes
no KV, and its rows of the output are never read. Rows are independent, so real rows do not depend on padding.

All graphs are captured as the engine starts, the largest first. They share one memory pool, in which each capture
reuses memory that larger graphs have freed. So all graphs together take little more memory than the largest. A graph
that does not fit into the budget is left out, and steps of its size use the next larger graph.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.devices.cuda_device import ALIGNMENT
from engine.devices.device import Device
from engine.distributed.tp_group import TPGroup
from engine.errors import StartupError
from engine.model.batch import Batch, Chunk, KVGroup, row_tiles
from engine.model.state import StateBatch, StateCache
from engine.runner.step import StepMemory
from engine.wire.parts.states import StateStep

logger = logging.getLogger(__name__)

MAX_DECODE_SIZE = 512  # sequences; with more, a step takes so long that launching its kernels costs nothing
MAX_MIXED_SIZE = 1024  # tokens of a step with chunks, likewise
MIXED_SIZE_STEP = 128  # rows of a tile in a matrix product, which computes whole tiles: so padding costs little
MIB = 2**20


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of the steps that a graph can compute."""

    tokens: int
    seqs: int
    tile_rows: int = 0  #: rows of a tile of attention; 0 in a step that only decodes
    kv_groups: int = 1
    verified: int = 0  #: most tokens of a sequence in a step that verifies drafts; 0 in other steps

    @property
    def longest(self) -> int:
        """The maximum number of tokens of one sequence."""
        return self.verified or (self.tokens if self.tile_rows else 1)

    @property
    def tiles(self) -> int:
        """The largest number of tiles that the chunks of such a step can need: all full tiles, and a last tile for each
        chunk."""
        if self.verified:
            return self.seqs * -(-self.verified // self.tile_rows)
        return self.tokens // self.tile_rows + min(self.seqs, self.tokens // 2) if self.tile_rows else 0

    def holds(self, tokens: int, seqs: int, longest: int) -> bool:
        """Return whether a step fits. longest: tokens of its longest sequence."""
        return tokens <= self.tokens and seqs <= self.seqs and longest <= self.longest


class StepColumns(NamedTuple):
    """The inputs of a step as views of one buffer, so that one copy moves all of them."""

    token_index: Any  #: [tokens] int64, where each token is in the flattened history
    positions: Any  #: [tokens] int64, as in Batch
    slot_mappings: list[Any]  #: [tokens] int64 for each KV cache group, as in Batch
    slots: Any  #: [seqs] int64, rows of the block tables
    kv_len: Any  #: [seqs] int32, as in Batch
    query_start: Any  #: [seqs + 1] int32, as in Batch
    single: Any  #: [seqs] int32, as in Batch
    save_at: Any  #: [seqs] int32, as in StateBatch
    save_slots: Any  #: [seqs] int32, as in StateBatch
    tiles: Any  #: [tiles * 4] int32, from `row_tiles`

    @classmethod
    def of(cls, buffer: Any, shape: StepShape, int64: Any) -> StepColumns:
        """Return the columns of a buffer [`buffer_size(shape)`] int32, an array or a tensor. int64: numpy's or torch's
        dtype of that name, whichever the buffer needs."""
        columns = [buffer[a:b].view(int64) if wide else buffer[a:b] for a, b, wide in layout(shape)]
        return cls._make([*columns[:2], columns[2 : 2 + shape.kv_groups], *columns[2 + shape.kv_groups :]])


@cache
def layout(shape: StepShape) -> list[tuple[int, int, bool]]:
    """Return for each column its begin and end in a buffer of int32, and whether it is int64."""
    wide = [shape.tokens] * (2 + shape.kv_groups) + [shape.seqs]
    sizes = [2 * size for size in wide] + [shape.seqs, shape.seqs + 1, *[shape.seqs] * 3, 4 * shape.tiles]
    columns, begin, unit = [], 0, ALIGNMENT // 4
    for i, size in enumerate(sizes):
        columns.append((begin, begin + size, i < len(wide)))
        begin += -(-size // unit) * unit  # aligned alike, since Triton compiles a kernel again for another alignment
    return columns


def buffer_size(shape: StepShape) -> int:
    return layout(shape)[-1][1]


@cache
def empty_step(shape: StepShape) -> NDArray[np.int32]:
    """Return a buffer of padding only. It is cached: copy it before writing."""
    buffer = np.zeros(buffer_size(shape), dtype=np.int32)
    columns = StepColumns.of(buffer, shape, np.int64)
    for column in (*columns.slot_mappings, columns.single, columns.save_at):
        column[:] = -1
    return buffer


def pad_step(
    shape: StepShape,
    token_index: NDArray[np.int64],
    positions: NDArray[np.int64],
    slot_mappings: list[NDArray[np.int64]],
    slots: NDArray[np.int64],
    kv_len: NDArray[np.int64],
    query_start: NDArray[np.int64],
    single: NDArray[np.int32],
    chunks: NDArray[np.int64],
    saves: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """Return a buffer [`buffer_size(shape)`] with the inputs of a step, padded to a shape. chunks: [n, 4], from
    `split_rows`. saves: [2, seqs] int32, see `StateCache.saves`."""
    buffer = empty_step(shape).copy()
    columns = StepColumns.of(buffer, shape, np.int64)
    tokens, seqs = len(positions), len(slots)
    columns.token_index[:tokens], columns.positions[:tokens] = token_index, positions
    for column, mapping in zip(columns.slot_mappings, slot_mappings, strict=True):
        column[:tokens] = mapping
    columns.slots[:seqs], columns.kv_len[:seqs] = slots, kv_len
    columns.query_start[: seqs + 1], columns.query_start[seqs + 1 :] = query_start, tokens
    columns.single[: len(single)] = single
    if saves is not None:
        columns.save_at[:seqs], columns.save_slots[:seqs] = saves
    if len(chunks):
        tiles = row_tiles(chunks, shape.tile_rows)
        columns.tiles[: tiles.size] = tiles.reshape(-1)
    return buffer


@dataclass(frozen=True, slots=True)
class UnpaddedStep:
    """The inputs of a step that a graph can compute, before its shape is known. Arrays as for `pad_step`."""

    token_index: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mappings: list[NDArray[np.int64]]
    slots: NDArray[np.int64]
    counts: NDArray[np.int64]  #: [seqs], tokens of each sequence
    kv_len: NDArray[np.int64]
    query_start: NDArray[np.int64]
    saves: NDArray[np.int32] | None

    @property
    def size(self) -> tuple[int, int, int]:
        """Tokens, sequences, and tokens of the longest sequence."""
        return len(self.positions), len(self.slots), int(self.counts.max())

    def pad(self, shape: StepShape, single: NDArray[np.int32], chunks: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the buffer of `pad_step`. single, chunks: from `split_rows`."""
        columns = self.token_index, self.positions, self.slot_mappings, self.slots, self.kv_len, self.query_start
        return pad_step(shape, *columns, single, chunks, self.saves)


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the sizes of decode steps to capture: 1, 2, 4, multiples of 8, and min(max_num_seqs, MAX_DECODE_SIZE).

    Padding costs little, since weights are read for 8 rows in the time of one; graphs cost memory.
    """
    top = min(max_num_seqs, MAX_DECODE_SIZE)
    return [size for size in (1, 2, 4, *range(8, top, 8)) if size < top] + [top]


def mixed_sizes(max_num_batched_tokens: int) -> list[int]:
    """Return the sizes, in tokens, of the steps with chunks to capture."""
    top = min(max_num_batched_tokens, MAX_MIXED_SIZE)
    return [*range(MIXED_SIZE_STEP, top, MIXED_SIZE_STEP), top]


@dataclass(frozen=True, slots=True)
class Graph:
    inputs: Tensor  #: from `pad_step`: every replay reads its inputs here
    output: Tensor  #: [tokens, hidden]: every replay writes its result here
    replay: Callable[[], None]
    destroy: Callable[[], None]


class NoGraphs:
    """Stand-in for CudaGraphs where steps run without graphs."""

    captured: Sequence[StepShape] = ()

    def capture(self, shapes: Sequence[StepShape]) -> None:
        pass

    def drop(self) -> None:
        pass

    def shape_for(self, tokens: int, seqs: int, longest: int) -> StepShape | None:
        return None

    def run(self, shape: StepShape, inputs: Tensor) -> Tensor:
        raise NotImplementedError("no graph has been captured")

    def agreed(self, sizes: Sequence[tuple[int, int, int] | None], engine: int) -> StepShape | None:
        return None

    def run_empty(self, shape: StepShape) -> None:
        raise NotImplementedError("no graph has been captured")


class CudaGraphs:
    """The captured graphs of one rank. Ranks that share a model capture the same shapes in the same order."""

    def __init__(
        self,
        device: Device,
        forward: Callable[[Tensor, Batch], Tensor],
        tables: Tensor,
        memory: StepMemory,
        *,
        budget_bytes: int,
        tp: TPGroup,
    ):
        """forward: returns hidden states [tokens, hidden] for token ids [tokens] int64 and their batch. tables:
        [groups, slots, max_blocks] int32. Its contents change between steps; its address must not. budget_bytes: device
        memory for all graphs together."""
        self._device, self._forward, self._tp = device, forward, tp
        self._tables, self._memory = tables, memory
        self._graphs: dict[StepShape, Graph] = {}
        tp.before_close(self._destroy)
        self.budget_bytes, self.used_bytes = budget_bytes, 0
        self.captured: list[StepShape] = []
        """Shapes that have a graph, the smallest first."""

    def beside(self, forward: Callable[[Tensor, Batch], Tensor], kv_cache: Tensor, budget_bytes: int) -> CudaGraphs:
        """Return graphs of another model, which rank 0 alone computes over the same tokens and block tables. It has one
        KV cache group and no states."""
        return CudaGraphs(
            self._device,
            forward,
            self._tables,
            StepMemory([kv_cache], [None], self._memory.history),
            budget_bytes=budget_bytes,
            tp=TPGroup.single(),
        )

    def capture(self, shapes: Sequence[StepShape]) -> None:
        """Capture the shapes that fit into the budget, the largest first; stop at the first that cannot be captured.

        If a step cannot be computed, raises its error on this rank, and StartupError on the others. Raises StartupError
        on all ranks if their shapes differ.
        """
        started, in_use, left_out = time.perf_counter(), self._device.used_bytes(), []
        shapes = sorted(shapes, key=lambda shape: (shape.tokens, shape.longest), reverse=True)
        for shape in shapes:
            self._compute(shape, self._inputs(shape))  # compiles its kernels
        # Before anything waits for the device: if a rank failed before an all-reduce, the kernels of the others spin
        # there for ever. Ranks with other shapes would wait for each other's exchanges below.
        lists = self._tp.exchange(str(shapes))
        if others := [rank for rank, other in enumerate(lists) if other != lists[0]]:
            raise StartupError(f"ranks {others} are about to capture other graphs than rank 0")
        for shape in shapes:
            problem = self._capture(shape)
            # all ranks decide alike: a collective must not be in a graph on some of them only
            answers = self._tp.exchange(f"{self._device.used_bytes() - in_use} {problem}")
            used, problems = zip(*(answer.split(" ", 1) for answer in answers), strict=True)
            if any(problems):
                self._destroy(shape)
                why = next(filter(None, problems))
                logger.warning("steps run without more graphs: %s cannot be captured: %s", shape, why)
                break
            if max(map(int, used)) > self.budget_bytes:
                self._destroy(shape)
                left_out.append(shape.tokens)
                continue
            self.used_bytes = max(map(int, used))
            self.captured.insert(0, shape)
        if left_out:
            logger.warning("graphs of these sizes do not fit into cuda_graph_memory_gib: %s", sorted(left_out))
        mixed = sum(shape.longest == shape.tokens > 1 for shape in self.captured)
        logger.info(
            "graphs captured: %d of decode steps, %d of mixed steps, seconds=%.1f MiB=%.1f budget_MiB=%.0f",
            len(self.captured) - mixed, mixed, time.perf_counter() - started, self.used_bytes / MIB,
            self.budget_bytes / MIB,
        )  # fmt: skip

    def drop(self) -> None:
        """Destroy all graphs."""
        self._destroy()
        self.captured.clear()
        self.used_bytes = 0

    def shape_for(self, tokens: int, seqs: int, longest: int) -> StepShape | None:
        """Return the smallest captured shape that a step fits; None if there is none. longest: tokens of the longest
        sequence."""
        first = bisect_left(self.captured, tokens, key=lambda shape: shape.tokens)
        return next((shape for shape in self.captured[first:] if shape.holds(tokens, seqs, longest)), None)

    def run(self, shape: StepShape, inputs: Tensor) -> Tensor:
        """Return the hidden states [tokens, hidden] of a step, valid until the next step of this shape.

        inputs: from `pad_step`, on the device.
        """
        graph = self._graphs[shape]
        graph.inputs.copy_(inputs)
        graph.replay()
        return graph.output

    def _inputs(self, shape: StepShape) -> Tensor:
        return torch.from_numpy(empty_step(shape).copy()).to(self._device.torch_device)

    def _compute(self, shape: StepShape, inputs: Tensor) -> Tensor:
        columns = StepColumns.of(inputs, shape, torch.int64)
        first, *others = [
            KVGroup(mapping, table.index_select(0, columns.slots), cache, scales)
            for mapping, table, cache, scales in zip(
                columns.slot_mappings, self._tables, self._memory.kv_caches, self._memory.kv_scales, strict=True
            )
        ]
        states = None
        cache: StateCache | None = self._memory.of.get(StateStep.part)
        if cache is not None and cache.layers:
            states = StateBatch(cache.layers, columns.slots.int(), columns.save_at, columns.save_slots)
        batch = Batch(
            positions=columns.positions,
            slot_mapping=first.slot_mapping,
            query_start=columns.query_start,
            kv_len=columns.kv_len,
            block_table=first.block_table,
            kv_cache=first.kv_cache,
            single=columns.single[:0] if shape.verified else columns.single,
            # one chunk in place of all: on the host, kernels use chunks only to bound their sizes
            chunks=[Chunk(0, 0, shape.longest, 0)] if shape.tile_rows else [],
            tiles=columns.tiles.view(-1, 4) if shape.tile_rows else None,
            kv_scales=first.kv_scales,
            other_groups=tuple(others),
            states=states,
        )
        return self._forward(self._memory.history.view(-1)[columns.token_index].long(), batch)

    def _capture(self, shape: StepShape) -> str:
        """Capture one shape. Return why it cannot be captured, or an empty string."""
        inputs = self._inputs(shape)
        try:
            self._graphs[shape] = Graph(inputs, *self._device.capture(lambda: self._compute(shape, inputs)))
        except RuntimeError as error:
            first = error.__context__ or error  # ending a broken capture raises another error
            return str(first) or type(first).__name__
        return ""

    def _destroy(self, *shapes: StepShape) -> None:
        """Destroy the graphs of these shapes, or all. Dropping the references is not enough, since an error may hold
        some."""
        for shape in shapes or list(self._graphs):
            if shape in self._graphs:
                self._graphs.pop(shape).destroy()
