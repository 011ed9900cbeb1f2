"""RMSNorm, arXiv:1910.07467.

rms_norm(x, weight, eps, shift) -> like x, contiguous
    x / sqrt(mean(x^2) + eps) * (shift + weight) over the last dimension, computed in float32
    x: [tokens, size] or [tokens, heads, size], the last dimension contiguous; weight: [size]
add_rms_norm(x, y, weight, eps, shift) -> (x + y, its norm)
    x, y: [tokens, size]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.ops import dispatch

RMSNormOp = Callable[[Tensor, Tensor, float, float], Tensor]
AddRMSNormOp = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


def select(dtype: torch.dtype, device: torch.device) -> tuple[RMSNormOp, AddRMSNormOp]:
    """Return the fastest versions of both ops."""
    return (
        dispatch.fastest(rms_norm_plain, dtype, device, cpu="norm", gpu="norm"),
        dispatch.fastest(add_rms_norm_plain, dtype, device, cpu="norm", gpu="norm"),
    )


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
