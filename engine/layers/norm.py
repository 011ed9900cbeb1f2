"""RMSNorm, arXiv:1910.07467."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.layers.shard import Shard, Sharded, replicated


class RMSNorm(Sharded):
    """Over the last dimension, computed in float32. Every rank holds the whole weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normalise(x).to(x.dtype)

    def normalise(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def shards(self) -> dict[str, Shard]:
        return {"weight": replicated(self.weight)}
