"""Carries rows of mixture layers between engines that share experts, in steps that all engines take together.

Each engine has rows of its own requests, and some of the experts. In each mixture layer every engine gets the rows of
all engines, computes its experts for them, and gets back the results for its own rows. The numbers of rows are told
once for each step, in `begin`. Rows are padded to the largest of these numbers, since every backend can gather and
scatter equal parts, and some can do nothing else. Padding is never computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

NO_STEP = -1


class Ranks(Protocol):
    """One rank of each engine: a TPGroup."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, x: Tensor) -> Tensor: ...

    def reduce_scatter(self, x: Tensor) -> Tensor: ...


class ExpertExchange:
    """One engine's end. Used by one thread."""

    def __init__(self, ranks: Ranks, device: str = "cpu"):
        self.rank, self.size = ranks.rank, ranks.size
        self._ranks, self._device = ranks, device
        self._counts: list[int] | None = None

    def use(self, ranks: Ranks) -> None:
        """Exchange with these ranks from now on, because an engine was lost."""
        self.rank, self.size, self._ranks = ranks.rank, ranks.size, ranks

    def begin(self, rows: int | None) -> bool:
        """Begin a step of all engines, and return whether any has one. rows: number of rows of this engine; None if it
        has no step. On a GPU this waits for the device."""
        told = torch.tensor([NO_STEP if rows is None else rows], device=self._device)
        answers = self._ranks.all_gather(told).tolist()
        self._counts = [max(0, count) for count in answers]
        return any(count != NO_STEP for count in answers)

    def chunks(self, rows: int, at_once: int) -> Iterator[tuple[int, list[int]]]:
        """Yield a start, and the number of rows of each engine from there on: at most `at_once`. rows: of this engine.
        Before the first step, all engines have as many, since they take the same dummy steps while they load."""
        counts = self._counts or [rows] * self.size
        for start in range(0, max(counts), at_once):
            yield start, [min(at_once, max(0, count - start)) for count in counts]

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all engines, in their order. rows: [counts[rank], ...]."""
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        found = self._ranks.all_gather(padded.flatten()).view(self.size, *padded.shape)
        return torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])

    def scatter(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the sum of what all engines have for this engine's rows: [counts[rank], ...]. rows: for the rows that
        `gather` returns."""
        padded = rows.new_zeros(self.size, max(counts), *rows.shape[1:])
        for part, found in zip(padded, rows.split(list(counts)), strict=True):
            part[: len(found)] = found
        return self._ranks.reduce_scatter(padded)[: counts[self.rank]]
