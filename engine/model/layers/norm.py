"""RMSNorm, arXiv:1910.07467."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.model.ops import norm
from engine.model.shard import Sharded, Shards, replicated


class RMSNorm(Sharded):
    """RMSNorm over the last dimension, in float32, scaled by (`shift` + weight). Every rank holds the whole weight."""

    shift: ClassVar[float] = 0.0

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.rms_norm, self.add_rms_norm = norm.select(self.dtype, self.device)

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, self.weight, self.eps, self.shift)

    def add(self, residual: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (residual + x, its norm), computed by one kernel on a GPU. residual: None for zeros."""
        if residual is None:
            return x, self(x)
        return self.add_rms_norm(residual, x, self.weight, self.eps, self.shift)

    def of_heads(self, k_norm: RMSNorm) -> norm.HeadNorms:
        """Return the norms of q's and k's heads: this norm, for q, and `k_norm`."""
        return norm.HeadNorms(self.weight, k_norm.weight, self.eps, self.shift)

    def shards(self) -> Shards:
        return {"weight": replicated(self.weight)}
