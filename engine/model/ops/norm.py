"""RMSNorm, arXiv:1910.07467.

rms_norm(x, weight, eps, shift) -> like x, contiguous
    x / sqrt(mean(x^2) + eps) * (shift + weight) over the last dimension, computed in float32
    x: [tokens, size] or [tokens, heads, size], each token's values contiguous; weight: [size]
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


class HeadNorms(NamedTuple):
    """RMSNorms of the heads of q and of k, whose weights are [head_dim] each."""

    q: Tensor
    k: Tensor
    eps: float
    shift: float

    def apply(self, rms_norm: RMSNormOp, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm(q, self.q, self.eps, self.shift), rms_norm(k, self.k, self.eps, self.shift)


def select(dtype: torch.dtype, device: torch.device) -> tuple[RMSNormOp, AddRMSNormOp]:
    """The fastest versions of both ops."""
    if dispatch.cpu_kernels(dtype, device):
        from engine.model.ops.cpu import norm as cpu

        return cpu.rms_norm, cpu.add_rms_norm
    if dispatch.gpu_kernels(dtype, device):
        from engine.model.ops.gpu import norm as gpu

        return gpu.rms_norm, gpu.add_rms_norm
    return rms_norm_plain, add_rms_norm_plain


def rms_norm_plain(x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if shift:
        return (wide * (shift + weight.float())).to(x.dtype)
    return weight * wide.to(x.dtype)


def add_rms_norm_plain(x: Tensor, y: Tensor, weight: Tensor, eps: float, shift: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, rms_norm_plain(total, weight, eps, shift)
