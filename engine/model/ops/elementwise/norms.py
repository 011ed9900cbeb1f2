"""Norms of recurrent layers.

gated_rms_norm(x, gate, weight, eps, by_sigmoid) -> like x, of the gate's dtype
    rms_norm of x (ops/norm.py), in x's dtype, times SiLU or the sigmoid of the gate, in float32
    x, gate: [tokens, heads, size]; x may also be float32
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.ops import dispatch
from engine.model.ops.elementwise.gates import sigmoid, silu
from engine.model.ops.norm import rms_norm_plain

GatedRMSNormOp = Callable[[Tensor, Tensor, Tensor, float, bool], Tensor]


class GroupNorm(NamedTuple):
    """RMSNorm of each of `groups` equal parts of a token's values."""

    weight: Tensor  #: [values of a token]
    eps: float
    groups: int
    gate_last: bool  #: whether values are normed before they are gated
    factors: Callable[[Tensor], Tensor]
    """Returns the factor that norms each group: [tokens, values] float32 -> [tokens, groups]. A group may be split over
    ranks. Kernels see only whole groups and do not call this function."""


def select_gated(dtype: torch.dtype, device: torch.device) -> GatedRMSNormOp:
    """Return the fastest version of the gated norm."""
    return dispatch.fastest(gated_rms_norm_plain, dtype, device, cpu="norm", gpu="norm")


def gated_rms_norm_plain(x: Tensor, gate: Tensor, weight: Tensor, eps: float, by_sigmoid: bool) -> Tensor:
    opened = (sigmoid if by_sigmoid else silu)(gate.float())
    return (rms_norm_plain(x, weight, eps, 0.0) * opened).to(gate.dtype)


def unit_length(x: Tensor, eps: float) -> Tensor:
    """Divide x by its length over the last dimension, sqrt(sum of squares + eps)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def unit_q_and_k(q: Tensor, k: Tensor, scale: float, eps: float | None) -> tuple[Tensor, Tensor]:
    """Return q times `scale` and k in float32, first scaled to unit length unless `eps` is None."""
    q, k = (x.float() if eps is None else unit_length(x.float(), eps) for x in (q, k))
    return q * scale, k
