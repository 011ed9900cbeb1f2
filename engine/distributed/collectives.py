"""Collective operations of ranks."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """A way of summing and gathering tensors between ranks."""

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return [size, *x.shape]."""

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...
