"""Gated activations: x [tokens, 2 * n], contiguous, with the gate before the value -> [tokens, n].

`relu2` has no gate: [tokens, n] -> [tokens, n].
`swigluoai` (vLLM's name) is gpt-oss's, arXiv:2508.10925: gate and value alternate, and both are clamped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.config_parts.moe import SWIGLU_ALPHA, SWIGLU_LIMIT
from engine.model.ops import dispatch

Product = Callable[[Tensor, Tensor], Tensor]
Scaled = Callable[[Tensor, float, torch.dtype], Tensor]


def sigmoid(x: Tensor) -> Tensor:
    """Compute the sigmoid. On a CPU it is computed by exp. torch's own sigmoid, silu and softplus give other bits for
    the last elements of a tensor, so a row's bits would depend on how many rows follow."""
    return 1 / (1 + (-x).exp()) if x.device.type == "cpu" else x.sigmoid()


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def softplus(x: Tensor) -> Tensor:
    return torch.where(x > 20, x, x.exp().log1p())


def silu_mul(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def gelu_tanh_mul(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * value


def swigluoai_mul(x: Tensor) -> Tensor:
    gate, value = x[..., ::2].clamp(max=SWIGLU_LIMIT), x[..., 1::2].clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(gate * SWIGLU_ALPHA) * (value + 1)


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def multiply(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def open_gate(x: Tensor, gate: Tensor) -> Tensor:
    return x * sigmoid(gate).flatten(1)


def scaled(x: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    return (x if factor == 1.0 else x * factor).to(dtype)


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_mul,
    "gelu_pytorch_tanh": gelu_tanh_mul,
    "swigluoai": swigluoai_mul,
    "relu2": relu2,
}


def select(name: str, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the fastest version of the activation that config.json names."""
    return dispatch.fastest(PLAIN[name], dtype, device, cpu="activation", gpu="activation")


def select_multiply(dtype: torch.dtype, device: torch.device) -> Product:
    """Return the fastest version of: x, y [tokens, n] -> x * y."""
    return dispatch.fastest(multiply, dtype, device, cpu="activation")


def select_scaled(dtype: torch.dtype, device: torch.device) -> Scaled:
    """Return the fastest version of: x [tokens, n], factor, dtype -> x * factor in this dtype, rounded once."""
    return dispatch.fastest(scaled, dtype, device, cpu="activation")


def select_open_gate(dtype: torch.dtype, device: torch.device) -> Product:
    """Return the fastest version of: x [tokens, n], gate [tokens, heads, n / heads] -> x * sigmoid(gate)."""
    return dispatch.fastest(open_gate, dtype, device, cpu="activation", gpu="activation")
