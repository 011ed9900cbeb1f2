"""Interface of collective operations between ranks."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """A way to sum and gather tensors across ranks."""

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x`, stacked: [size, *x.shape]."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks of this rank's part of x [size, ...]."""

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...
