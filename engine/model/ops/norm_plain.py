"""RMSNorm in plain torch, and the norms that attention ops apply to q and k. See norm.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

RMSNormOp = Callable[[Tensor, Tensor, float, float], Tensor]
AddRMSNormOp = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


class HeadNorms(NamedTuple):
    """RMSNorms of q's and k's heads, with weights [head_dim] each."""

    q: Tensor
    k: Tensor
    eps: float
    shift: float

    def apply(self, rms_norm: RMSNormOp, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm(q, self.q, self.eps, self.shift), rms_norm(k, self.k, self.eps, self.shift)


def rms_norm_plain(x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if shift:
        return (wide * (shift + weight.float())).to(x.dtype)
    return weight * wide.to(x.dtype)


def add_rms_norm_plain(x: Tensor, y: Tensor, weight: Tensor, eps: float, shift: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, rms_norm_plain(total, weight, eps, shift)
