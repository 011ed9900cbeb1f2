"""RMSNorm, arXiv:1910.07467.

rms_norm(x, weight, eps, shift) -> like x, contiguous
    x / sqrt(mean(x^2) + eps) * (shift + weight) over the last dimension, computed in float32
    x: [tokens, size] or [tokens, heads, size], the last dimension contiguous; weight: [size]
add_rms_norm(x, y, weight, eps, shift) -> (x + y, its norm)
    x, y: [tokens, size]
"""

from __future__ import annotations

import torch

from engine.model.ops import dispatch
from engine.model.ops.norm_plain import AddRMSNormOp, RMSNormOp, add_rms_norm_plain, rms_norm_plain


def select(dtype: torch.dtype, device: torch.device) -> tuple[RMSNormOp, AddRMSNormOp]:
    """Return the fastest versions of both ops."""
    return (
        dispatch.fastest(rms_norm_plain, dtype, device, cpu="norm", gpu="norm"),
        dispatch.fastest(add_rms_norm_plain, dtype, device, cpu="norm", gpu="norm"),
    )
