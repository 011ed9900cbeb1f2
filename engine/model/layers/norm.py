"""RMSNorm, arXiv:1910.07467, and LayerNorm, arXiv:1607.06450."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.ops import norm, norm_plain
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

    def of_heads(self, k_norm: RMSNorm) -> norm_plain.HeadNorms:
        """Return the norms of q's and k's heads: this norm, for q, and `k_norm`."""
        return norm_plain.HeadNorms(self.weight, k_norm.weight, self.eps, self.shift)

    def shards(self) -> Shards:
        return {"weight": replicated(self.weight)}


class UnweightedRMSNorm(nn.Module):
    """RMSNorm over the last dimension, in float32, without a weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps, self.weight = eps, torch.ones(size)
        self.rms_norm, _ = norm.select(torch.get_default_dtype(), torch.get_default_device())

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, self.weight, self.eps, 0.0)


class GatedRMSNorm(Sharded):
    """RMSNorm of each head, in float32, times SiLU of the gate: x and gate [tokens, heads, size] -> the same. Every
    rank holds the whole weight."""

    by_sigmoid: ClassVar[bool] = False

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.gated_rms_norm = norm.select_gated(self.dtype, self.device)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.gated_rms_norm(x, gate, self.weight, self.eps, self.by_sigmoid)

    def shards(self) -> Shards:
        return {"weight": replicated(self.weight)}


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
