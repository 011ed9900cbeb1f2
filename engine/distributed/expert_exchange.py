"""Carries rows of mixture layers between engines that share experts, in steps that all engines take together.

Each engine has rows of its own requests, and each of its ranks has some of the experts. In each mixture layer every
rank gets the rows of all engines, computes its experts for them, and gets back results for rows of its own engine. The
ranks of an engine all have its rows, so each sends a share of them. The numbers of rows are told once for each step, in
`begin`. Rows are padded to the largest of these numbers, since every backend can gather and scatter equal parts, and
some can do nothing else. Padding is never computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

NO_STEP = -1


class Ranks(Protocol):
    """All ranks of all engines, engine by engine: a TPGroup."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, x: Tensor) -> Tensor: ...

    def reduce_scatter(self, x: Tensor) -> Tensor: ...


class ExpertExchange:
    """One rank's end. Used by one thread."""

    def __init__(self, ranks: Ranks, device: str = "cpu", ranks_per_engine: int = 1):
        self._device, self._width = device, ranks_per_engine
        self.use(ranks)
        self._counts: list[int] | None = None
        self.has_step = False  #: whether this engine has a step, since the last call of `begin`
        self.states: list[int] = []  #: what each rank has told in the last call of `begin`

    def use(self, ranks: Ranks) -> None:
        """Exchange with these ranks from now on."""
        self._ranks, self.rank, self.size = ranks, ranks.rank, ranks.size
        self.engines = ranks.size // self._width
        self._engine, self._place = divmod(ranks.rank, self._width)

    def begin(self, rows: int | None, state: int = 0) -> bool:
        """Begin a step of all engines, and return whether any has one. rows: number of rows of this engine; None if it
        has no step. Only the first rank of an engine needs to know. state: a number that all ranks get to know. On a
        GPU this waits for the device."""
        told = torch.tensor([NO_STEP if rows is None else rows, state], device=self._device)
        rows_of_ranks, self.states = self._ranks.all_gather(told).view(self.size, 2).T.tolist()
        answers = rows_of_ranks[:: self._width]
        self._counts = [max(0, count) for count in answers]
        self.has_step = answers[self._engine] != NO_STEP
        return any(count != NO_STEP for count in answers)

    def chunks(self, rows: int, at_once: int) -> Iterator[tuple[int, list[int]]]:
        """Yield a start, and the number of rows of each engine from there on: at most `at_once`. rows: of this engine.
        Before the first step, all engines have as many, since they take the same dummy steps while they load."""
        counts = self._counts or [rows] * self.engines
        for start in range(0, max(counts), at_once):
            yield start, [min(at_once, max(0, count - start)) for count in counts]

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all engines, in their order. rows: of this engine, [counts[engine], ...]."""
        share = rows[self._share(counts)]
        padded = rows.new_zeros(self._share_size(counts), *rows.shape[1:])
        padded[: len(share)] = share
        found = self._ranks.all_gather(padded.flatten()).view(self.engines, -1, *rows.shape[1:])
        return torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])

    def scatter(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this rank's share of the sums of what all ranks have for this engine's rows: [counts[engine], ...],
        with 0 in the shares of the engine's other ranks. rows: for the rows that `gather` returns."""
        padded = rows.new_zeros(self.engines, self._width * self._share_size(counts), *rows.shape[1:])
        for part, found in zip(padded, rows.split(list(counts)), strict=True):
            part[: len(found)] = found
        sums = share = self._ranks.reduce_scatter(padded.view(self.size, -1, *rows.shape[1:]))
        if self._width > 1:
            sums = rows.new_zeros(padded.shape[1:])
            sums[self._share(counts)] = share
        return sums[: counts[self._engine]]

    def scatter_parts(self, parts: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the sums of what all ranks have for this engine's rows, of the part with this rank's number in its
        engine: [counts[engine], ...]. parts: [ranks of an engine, rows that `gather` returns, ...]."""
        padded = parts.new_zeros(self.engines, self._width, max(counts), *parts.shape[2:])
        for part, found in zip(padded, parts.split(list(counts), dim=1), strict=True):
            part[:, : found.shape[1]] = found
        return self._ranks.reduce_scatter(padded.flatten(0, 1))[: counts[self._engine]]

    def _share_size(self, counts: Sequence[int]) -> int:
        return -(-max(counts) // self._width)

    def _share(self, counts: Sequence[int]) -> slice:
        """Return which of the engine's rows this rank sends, and gets back."""
        size = self._share_size(counts)
        return slice(self._place * size, (self._place + 1) * size)
