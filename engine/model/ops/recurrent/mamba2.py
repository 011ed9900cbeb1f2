"""The steps before and after the linear attention of Mamba-2, arXiv:2405.21060, section 7.

steps(x, dt, log_rate, bias, limit) -> decay [tokens, heads, 1] float32, values [tokens, heads, d_v] float32
    With s = softplus(dt + bias), clamped to `limit`: decay = -exp(log_rate) * s; values = x * s.
    x: [tokens, heads * d_v]; dt: [tokens, heads], each token's values contiguous; log_rate, bias: [heads] float32
gated(y, x, z, skip, norm) -> [tokens, heads * d_v] of x's dtype
    (y + skip * x) * SiLU(z), and RMSNorm of each group of `norm` before or after the product, in float32.
    y: [tokens, heads, d_v] float32, which may be overwritten; x, z: [tokens, heads * d_v], each token's values
    contiguous; skip: [heads] float32; norm: None for no norm
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.ops import dispatch
from engine.model.ops.elementwise.gates import silu, softplus
from engine.model.ops.elementwise.norms import GroupNorm

Steps = Callable[[Tensor, Tensor, Tensor, Tensor, tuple[float, float]], tuple[Tensor, Tensor]]
Gated = Callable[[Tensor, Tensor, Tensor, Tensor, GroupNorm | None], Tensor]


def select(dtype: torch.dtype, device: torch.device) -> tuple[Steps, Gated]:
    """Return the fastest versions of both ops."""
    cpu = "recurrent.mamba2"
    return dispatch.fastest(steps_plain, dtype, device, cpu), dispatch.fastest(gated_plain, dtype, device, cpu)


def steps_plain(
    x: Tensor, dt: Tensor, log_rate: Tensor, bias: Tensor, limit: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    steps = softplus(dt.float() + bias).clamp(*limit)
    return (-log_rate.exp() * steps)[..., None], x.unflatten(-1, (len(bias), -1)).float() * steps[..., None]


def gated_plain(y: Tensor, x: Tensor, z: Tensor, skip: Tensor, norm: GroupNorm | None) -> Tensor:
    y = (y + skip[:, None] * x.unflatten(-1, y.shape[1:]).float()).flatten(1)
    opened = silu(z.float())
    if norm is None:
        return (y * opened).to(x.dtype)
    y = y if norm.gate_last else y * opened
    y = (y.unflatten(-1, (norm.groups, -1)) * norm.factors(y)[..., None]).flatten(1) * norm.weight.float()
    return (y * opened if norm.gate_last else y).to(x.dtype)
