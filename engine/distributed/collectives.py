"""Interface of collective operations between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """A way to sum and gather tensors across ranks."""

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x`, stacked: [size, *x.shape]."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks of this rank's part of x [size, ...]."""

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """Send the rows of x [rows, ...] to ranks, and return those that have come, by sender. counts: numbers of rows,
        by sender and receiver. x has its rows by receiver."""

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...
