"""RMSNorm, arXiv:1910.07467.

rms_norm(x, weight, eps, shift) -> like x, contiguous
    x / sqrt(mean(x^2) + eps) * (shift + weight) over the last dimension, computed in float32
    x: [tokens, size] or [tokens, heads, size], the last dimension contiguous; weight: [size]
add_rms_norm(x, y, weight, eps, shift) -> (x + y, its norm)
    x, y: [tokens, size]
gated_rms_norm(x, gate, weight, eps, by_sigmoid) -> like x, of the gate's dtype
    rms_norm of x, in x's dtype, times SiLU or the sigmoid of the gate, in float32
    x, gate: [tokens, heads, size]; x may also be float32
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.ops import activation, dispatch
from engine.model.ops.norm_plain import AddRMSNormOp, RMSNormOp, add_rms_norm_plain, rms_norm_plain

GatedRMSNormOp = Callable[[Tensor, Tensor, Tensor, float, bool], Tensor]


def select(dtype: torch.dtype, device: torch.device) -> tuple[RMSNormOp, AddRMSNormOp]:
    """Return the fastest versions of both ops."""
    return (
        dispatch.fastest(rms_norm_plain, dtype, device, cpu="norm", gpu="norm"),
        dispatch.fastest(add_rms_norm_plain, dtype, device, cpu="norm", gpu="norm"),
    )


def select_gated(dtype: torch.dtype, device: torch.device) -> GatedRMSNormOp:
    """Return the fastest version of the gated norm."""
    return dispatch.fastest(gated_rms_norm_plain, dtype, device, cpu="norm", gpu="norm")


def gated_rms_norm_plain(x: Tensor, gate: Tensor, weight: Tensor, eps: float, by_sigmoid: bool) -> Tensor:
    opened = (activation.sigmoid if by_sigmoid else activation.silu)(gate.float())
    return (rms_norm_plain(x, weight, eps, 0.0) * opened).to(gate.dtype)
