"""Gated activations: x [..., 2 * n], the gate before the value, -> [..., n]."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def silu_mul(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def gelu_tanh_mul(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * value


GATED: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu_mul, "gelu_pytorch_tanh": gelu_tanh_mul}
