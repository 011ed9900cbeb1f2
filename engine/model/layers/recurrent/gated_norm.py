"""The norm of a gated output."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.model.ops.elementwise import norms
from engine.model.shard import Sharded, Shards, replicated


class GatedRMSNorm(Sharded):
    """RMSNorm of each head, in float32, times SiLU of the gate: x and gate [tokens, heads, size] -> the same. Every
    rank holds the whole weight."""

    by_sigmoid: ClassVar[bool] = False

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.gated_rms_norm = norms.select_gated(self.dtype, self.device)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.gated_rms_norm(x, gate, self.weight, self.eps, self.by_sigmoid)

    def shards(self) -> Shards:
        return {"weight": replicated(self.weight)}
