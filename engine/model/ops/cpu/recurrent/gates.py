"""Decays and shares of the delta rule on a CPU. See ops/recurrent/gates.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.model.ops.cpu.kernel import (
    TokenCount,
    as_f32,
    device_function,
    each_dtype,
    empty,
    exp,
    load,
    work,
)

TOKENS = 4  # tokens that a thread takes at a time
LOG_2, SQRT_2 = 0.6931471805599453, 1.4142135623730951


@device_function
def log1p(x: Any) -> Any:
    """Return log(1 + x) for 0 <= x <= 1, with a relative error of 3e-7. Arithmetic only, as in `exp`: a polynomial
    (minimax, Cephes' logf), of half of 1 + x if that is above the square root of 2."""
    halved = np.float32(1.0) + x > np.float32(SQRT_2)
    z = np.float32(0.5) * (x - np.float32(1.0)) if halved else x
    p = np.float32(7.0376836292e-2)
    p = p * z - np.float32(1.1514610310e-1)
    p = p * z + np.float32(1.1676998740e-1)
    p = p * z - np.float32(1.2420140846e-1)
    p = p * z + np.float32(1.4249322787e-1)
    p = p * z - np.float32(1.6668057665e-1)
    p = p * z + np.float32(2.0000714765e-1)
    p = p * z - np.float32(2.4999993993e-1)
    p = p * z + np.float32(3.3333331174e-1)
    log = z - z * z * (np.float32(0.5) - z * p)
    return log + np.float32(LOG_2) if halved else log


@device_function
def softplus(x: Any) -> Any:
    """Return log(1 + e ** x)."""
    return max(x, np.float32(0.0)) + log1p(exp(-abs(x)))


@device_function
def gate_rows(as_x: Any, args: Any) -> None:
    """Compute decays and shares. args: a, b, log_rate, bias, decay, share, tokens, strides of a and b from token to
    token, heads, channels."""
    a, b, log_rate, bias = as_x(args[1]), as_x(args[2]), as_f32(args[3]), as_f32(args[4])
    decay, share, tokens, a_stride, b_stride = as_f32(args[5]), as_f32(args[6]), args[7], args[8], args[9]
    heads, channels = args[10], args[11]
    for token in work(args, tokens, TOKENS):
        for head in range(heads):
            rate = exp(log_rate[head])
            for i in range(head * channels, (head + 1) * channels):
                steps = softplus(load(a, token * a_stride + i) + bias[i])
                decay[token * heads * channels + i] = -rate * steps
            opened = np.float32(1.0) + exp(-load(b, token * b_stride + head))
            share[token * heads + head] = np.float32(1.0) / opened


GATES = each_dtype(gate_rows)


def gates(a: Tensor, b: Tensor, log_rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return decays and shares. a: [tokens, heads * channels], b: [tokens, heads], each token's values contiguous."""
    (tokens, heads), channels = b.shape, a.shape[1] // b.shape[1]
    decay, share = empty((tokens, heads, channels), torch.float32), empty(b.shape, torch.float32)
    GATES.launch(
        a.dtype, -(-tokens // TOKENS), a, b, log_rate, bias, decay, share, TokenCount(tokens), a.stride(0),
        b.stride(0), heads, channels,
    )  # fmt: skip
    return decay, share
