"""LayerNorm, arXiv:1607.06450."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.shard import Sharded, Shards, replicated


class LayerNorm(Sharded):
    """LayerNorm over the last dimension. Every rank holds the whole weight."""

    def __init__(self, size: int, eps: float, bias: bool = True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def shards(self) -> Shards:
        return {"weight": replicated(self.weight)} | ({} if self.bias is None else {"bias": replicated(self.bias)})
