"""Decode steps as CUDA graphs: a step of n sequences replays a graph that was captured for n sequences or a few more.

A step of small batches is hundreds of short kernels, which the host cannot launch as fast as a GPU runs them; a replay
is one launch. A graph repeats the same kernels on the same memory, so there is one graph for each of a few batch sizes;
its inputs lie in buffers that never move, and rows beyond n are padding. vLLM and nano-vLLM do the same.

A padding row is token 0 of the history at position 0, with no slot for its KV (-1) and no tokens (kv_len 0). Kernels
write no KV for it and read none, and its output is never read. Rows do not depend on each other, so the real ones do
not depend on the padding.

A size is captured when it first comes: that step runs as usual, on the padded buffers, which compiles and warms up its
kernels, and is then captured. So a start waits for no graph that nobody needs, and a small server holds few of them. A
capture takes about as long as a few steps without graphs, and some MiB; once these reach the budget, further sizes run
without graphs: slower, and otherwise the same.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device import Device
from engine.distributed.tp_group import TPGroup
from engine.model.batch import Batch

logger = logging.getLogger(__name__)

MAX_CAPTURE_SIZE = 512  # sequences; with more, a step takes so long that launching its kernels costs nothing
MIB = 2**20


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture, in order: 1, 2, 4, multiples of 8, and min(max_num_seqs, MAX_CAPTURE_SIZE).

    Padding costs little, since weights are read for 8 rows in the time of one; graphs cost memory.
    """
    top = min(max_num_seqs, MAX_CAPTURE_SIZE)
    return [size for size in (1, 2, 4, *range(8, top, 8)) if size < top] + [top]


def pad_to_capture_size(
    size: int,
    token_index: NDArray[np.int64],
    positions: NDArray[np.int64],
    slot_mapping: NDArray[np.int64],
    slots: NDArray[np.int64],
    kv_len: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return [5, size]: these inputs of each sequence, and padding. It is one array so that it travels in one copy.

    token_index: where each token lies in the flattened history. slots: rows of the block tables. Others: see Batch.
    """
    columns = (token_index, positions, slot_mapping, slots, kv_len)
    padded = np.zeros((len(columns), size), dtype=np.int64)
    for row, column in zip(padded, columns, strict=True):
        row[: len(column)] = column
    padded[2, len(slots) :] = -1
    return padded


@dataclass(frozen=True, slots=True)
class Graph:
    inputs: Tensor  #: [5, size], from `pad_to_capture_size`: every replay reads its inputs here
    output: Tensor  #: [size, hidden]: every replay writes its result here
    replay: Callable[[], None]


class DecodeGraphs:
    """The captured decode steps of one rank. Ranks that share a model call `run` with the same sizes in the same order,
    and decide alike."""

    def __init__(
        self,
        device: Device,
        forward: Callable[[Tensor, Batch], Tensor],
        history: Tensor,
        tables: Tensor,
        kv_cache: Tensor,
        kv_scales: Tensor | None,
        *,
        capture_sizes: Sequence[int],
        budget_bytes: int,
        tp: TPGroup,
    ):
        """forward: token ids [size] int64 and their batch -> hidden states.
        history: [slots, max_model_len] token ids. tables: [slots, max_blocks] int32. Their contents change between
        steps; their addresses do not.
        budget_bytes: device memory for all graphs together.
        """
        self.capture_sizes = list(capture_sizes)
        self._device, self._forward, self._tp = device, forward, tp
        self._history, self._tables, self._kv_cache, self._kv_scales = history, tables, kv_cache, kv_scales
        self._query_start = torch.arange(self.capture_sizes[-1] + 1, dtype=torch.int32, device=device.torch_device)
        self._graphs: dict[int, Graph] = {}
        tp.before_close(self._graphs.clear)
        self._budget_bytes, self.used_bytes = budget_bytes, 0
        self._full = False

    def capture_size_for(self, count: int) -> int | None:
        """Return the size to which a step of `count` sequences is padded; None if it is larger than all sizes."""
        index = bisect_left(self.capture_sizes, count)
        return self.capture_sizes[index] if index < len(self.capture_sizes) else None

    @property
    def captured(self) -> list[int]:
        """Batch sizes that have a graph."""
        return sorted(self._graphs)

    def run(self, inputs: Tensor) -> Tensor:
        """Return the hidden states [size, hidden] of a step, valid until the next step of this size.

        inputs: from `pad_to_capture_size`, on the device.
        """
        graph = self._graphs.get(inputs.shape[1])
        if graph is not None:
            graph.inputs.copy_(inputs)
            graph.replay()
            return graph.output
        hidden = self._compute(inputs)
        if not self._full:
            self._capture(inputs)
        return hidden

    def batch(self, inputs: Tensor) -> Batch:
        """Return the batch of a step, padding included. inputs: as `run` takes them."""
        _, positions, slot_mapping, slots, kv_len = inputs.unbind()
        size = len(slots)
        return Batch(
            positions=positions,
            slot_mapping=slot_mapping,
            query_start=self._query_start[: size + 1],
            kv_len=kv_len.int(),
            block_table=self._tables.index_select(0, slots),
            kv_cache=self._kv_cache,
            single=self._query_start[:size],
            chunks=[],
            kv_scales=self._kv_scales,
        )

    def _compute(self, inputs: Tensor) -> Tensor:
        return self._forward(self._history.view(-1)[inputs[0]].long(), self.batch(inputs))

    def _capture(self, example: Tensor) -> None:
        size, started = example.shape[1], time.perf_counter()
        inputs = example.clone()  # in memory that belongs to the graph
        before = self._device.used_bytes()
        graph, problem = None, ""
        try:
            graph = Graph(inputs, *self._device.capture(lambda: self._compute(inputs)))
        except RuntimeError as error:
            first = error.__context__ or error  # ending a broken capture raises another error
            problem = str(first) or type(first).__name__
        # all ranks decide alike: a collective must not be in a graph on some of them only
        problem = next(filter(None, self._tp.exchange(problem)), "")
        if problem or graph is None:
            self._full = True
            logger.warning("decode steps run without more graphs: batch_size=%d cannot be captured: %s", size, problem)
            return
        grown = max(map(int, self._tp.exchange(str(max(0, self._device.used_bytes() - before)))))
        self._graphs[size] = graph
        self.used_bytes += grown
        logger.info(
            "decode graph captured batch_size=%d ms=%.0f MiB=%.1f total_MiB=%.1f budget_MiB=%.0f",
            size, 1e3 * (time.perf_counter() - started), grown / MIB, self.used_bytes / MIB, self._budget_bytes / MIB,
        )  # fmt: skip
        if self.used_bytes >= self._budget_bytes:
            self._full = True
            logger.warning(
                "decode graphs have reached their budget cuda_graph_memory_gib=%.2f: batch sizes other than %s run "
                "without graphs",
                self._budget_bytes / 2**30, self.captured,
            )  # fmt: skip
