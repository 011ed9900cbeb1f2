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


class GroupNorm(NamedTuple):
    """RMSNorm of each of `groups` equal parts of a token's values."""

    weight: Tensor  #: [values of a token]
    eps: float
    groups: int
    gate_last: bool  #: whether values are normed before they are gated
    factors: Callable[[Tensor], Tensor]
    """Returns the factor that norms each group: [tokens, values] float32 -> [tokens, groups]. A group may be split over
    ranks. Kernels see only whole groups and do not call this function."""


def rms_norm_plain(x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if shift:
        return (wide * (shift + weight.float())).to(x.dtype)
    return weight * wide.to(x.dtype)


def add_rms_norm_plain(x: Tensor, y: Tensor, weight: Tensor, eps: float, shift: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, rms_norm_plain(total, weight, eps, shift)


def unit_length(x: Tensor, eps: float) -> Tensor:
    """Divide x by its length over the last dimension, sqrt(sum of squares + eps)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def unit_q_and_k(q: Tensor, k: Tensor, scale: float, eps: float | None) -> tuple[Tensor, Tensor]:
    """Return q times `scale` and k in float32, first scaled to unit length unless `eps` is None."""
    q, k = (x.float() if eps is None else unit_length(x.float(), eps) for x in (q, k))
    return q * scale, k
