"""Gated activations: x [tokens, 2 * n], contiguous, with the gate before the value -> [tokens, n]."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.ops import dispatch


def silu_mul(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def gelu_tanh_mul(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * value


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_mul,
    "gelu_pytorch_tanh": gelu_tanh_mul,
}


def select(name: str, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the fastest version of the activation that config.json names."""
    return dispatch.fastest(PLAIN[name], dtype, device, cpu="activation", gpu="activation")
