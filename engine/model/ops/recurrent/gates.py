"""Decays and shares of the delta rule: Gated DeltaNet, arXiv:2412.06464, section 3.4.

gates(a, b, log_rate, bias) -> decay [tokens, heads, channels] float32, share [tokens, heads] float32
    decay = -exp(log_rate) * softplus(a + bias); share = sigmoid(b)
    a: [tokens, heads * channels], b: [tokens, heads], each token's values contiguous
    log_rate: [heads] float32; bias: [heads * channels] float32
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.ops import dispatch
from engine.model.ops.elementwise.gates import sigmoid, softplus

Gates = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def select(dtype: torch.dtype, device: torch.device) -> Gates:
    """Return the fastest version."""
    return dispatch.fastest(gates_plain, dtype, device, cpu="recurrent.gates", gpu="recurrent.gates")


def gates_plain(a: Tensor, b: Tensor, log_rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    steps = softplus(a.float() + bias).unflatten(-1, (len(log_rate), -1))
    return -log_rate.exp()[:, None] * steps, sigmoid(b.float())
