"""RMSNorm, arXiv:1910.07467.

rms_norm(x, weight, eps, shift) -> like x, contiguous
    x / sqrt(mean(x^2) + eps) * (shift + weight) over the last dimension, computed in float32
    x: [tokens, size] or [tokens, heads, size], each token's values contiguous; weight: [size]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.ops import versions

RMSNormOp = Callable[[Tensor, Tensor, float, float], Tensor]


def choose() -> RMSNormOp:
    if versions.cpu_kernels():
        from engine.ops.cpu.norm import rms_norm

        return rms_norm
    return rms_norm_plain


def rms_norm_plain(x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if shift:
        return (wide * (shift + weight.float())).to(x.dtype)
    return weight * wide.to(x.dtype)
