"""The passes of a drafter over the newest token of each sequence, as CUDA graphs.

Such a pass is some twenty short kernels, and a proposal has a pass for each further draft. With graphs the host
launches one replay for each pass. There is a graph for each number of sequences for which decode steps have a graph.
A pass reads and writes memory that never moves, so replays follow each other without a copy between them. Rows beyond
the sequences have no room for a token: they write to the spare block of the cache.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.devices.device import Device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftRows:
    """One row for each sequence, in memory that never moves."""

    ids: Tensor  #: [seqs] int64, the newest draft
    hidden: Tensor  #: [seqs, hidden], the states from which it was drafted
    positions: Tensor  #: [seqs] int64, of the last token whose KV is in the cache
    capacity: Tensor  #: [seqs] int64, tokens for which the sequence has blocks
    tables: Tensor  #: [seqs, max_blocks] int32
    drafts: Tensor  #: [seqs, num_drafts] int64, the newest drafts in the last columns

    @classmethod
    def allocate(
        cls, seqs: int, hidden_size: int, max_blocks: int, num_drafts: int, dtype: torch.dtype, device: torch.device
    ) -> DraftRows:
        ids, positions, capacity = torch.zeros(3, seqs, dtype=torch.int64, device=device)
        return cls(
            ids=ids,
            hidden=torch.zeros(seqs, hidden_size, dtype=dtype, device=device),
            positions=positions,
            capacity=capacity,
            tables=torch.zeros(seqs, max_blocks, dtype=torch.int32, device=device),
            drafts=torch.zeros(seqs, num_drafts, dtype=torch.int64, device=device),
        )

    def first(self, seqs: int) -> DraftRows:
        """Return the rows of the first `seqs` sequences, in the same memory."""
        columns = self.ids, self.hidden, self.positions, self.capacity, self.tables, self.drafts
        return DraftRows(*(column[:seqs] for column in columns))


@dataclass(frozen=True, slots=True)
class RowGraph:
    output: Tensor  #: kept, so that no other graph takes its memory
    replay: Callable[[], None]
    destroy: Callable[[], None]


class DraftGraphs:
    """The graphs of one drafter."""

    def __init__(self, rows: DraftRows):
        self.rows = rows
        self._graphs: dict[int, RowGraph] = {}
        self.sizes: list[int] = []
        """Numbers of sequences that have a graph, the smallest first."""

    def capture(
        self, device: Device, sizes: Sequence[int], run: Callable[[DraftRows], Tensor], budget_bytes: int
    ) -> None:
        """Capture a pass of each of `sizes` that fits into the budget, the largest first; stop at the first that cannot
        be captured. run: computes a pass on some rows, and returns any tensor that it has made."""
        in_use = device.used_bytes()
        for size in sorted(sizes, reverse=True):
            rows = self.rows.first(size)
            run(rows)  # compiles its kernels
            try:
                graph = RowGraph(*device.capture(lambda rows=rows: run(rows)))  # type: ignore[misc]
            except RuntimeError as error:
                logger.warning("a drafter runs without more graphs: %d rows cannot be captured: %s", size, error)
                return
            if device.used_bytes() - in_use > budget_bytes:
                graph.destroy()
                continue
            self._graphs[size] = graph
            self.sizes.insert(0, size)
        logger.info("graphs captured: %d of a drafter", len(self.sizes))

    def run(
        self, passes: int, ids: Tensor, hidden: Tensor, positions: Tensor, capacity: Tensor, tables: Tensor
    ) -> Tensor | None:
        """Return [n, passes] int64, the drafts of these passes after `ids`; None if no graph has room for n rows. The
        arguments are columns of `DraftRows` with n rows."""
        count, place = len(ids), bisect_left(self.sizes, len(ids))
        if place == len(self.sizes):
            return None
        size = self.sizes[place]
        rows = self.rows.first(count)
        rows.ids.copy_(ids)
        rows.hidden.copy_(hidden)
        rows.positions.copy_(positions)
        rows.tables[:, : tables.shape[1]].copy_(tables)
        if count < size:
            self.rows.capacity[count:size].zero_()
        rows.capacity.copy_(capacity)
        for _ in range(passes):
            self._graphs[size].replay()
        return rows.drafts[:, rows.drafts.shape[1] - passes :]
