"""Sigmoids, gates and products of single values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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


def multiply(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def open_gate(x: Tensor, gate: Tensor) -> Tensor:
    return x * sigmoid(gate).flatten(1)


def scaled(x: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    return (x if factor == 1.0 else x * factor).to(dtype)


def select_multiply(dtype: torch.dtype, device: torch.device) -> Product:
    """Return the fastest version of: x, y [tokens, n] -> x * y."""
    return dispatch.fastest(multiply, dtype, device, cpu="activation")


def select_scaled(dtype: torch.dtype, device: torch.device) -> Scaled:
    """Return the fastest version of: x [tokens, n], factor, dtype -> x * factor in this dtype, rounded once."""
    return dispatch.fastest(scaled, dtype, device, cpu="activation")


def select_open_gate(dtype: torch.dtype, device: torch.device) -> Product:
    """Return the fastest version of: x [tokens, n], gate [tokens, heads, n / heads] -> x * sigmoid(gate)."""
    return dispatch.fastest(open_gate, dtype, device, cpu="activation", gpu="activation")
