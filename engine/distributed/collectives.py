"""Interface of collective operations between ranks."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """A way to sum and gather tensors across ranks."""

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x`, stacked: [size, *x.shape]."""

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...
