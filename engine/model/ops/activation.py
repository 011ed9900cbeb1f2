"""Gated activations: x [tokens, 2 * n], contiguous, the gate before the value -> [tokens, n]."""

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


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu_mul, "gelu_pytorch_tanh": gelu_tanh_mul}


def select(name: str, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The fastest version of the activation that config.json names."""
    if name == "silu" and dispatch.cpu_kernels(dtype, device):
        from engine.model.ops.cpu import activation

        return activation.silu_mul
    if dispatch.gpu_kernels(dtype, device):
        from engine.model.ops.gpu.activation import GATED

        return GATED[name]
    return PLAIN[name]
