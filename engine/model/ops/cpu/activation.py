"""Activations on a CPU. See ops/activation.py."""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.model.config_parts.moe import SWIGLU_ALPHA, SWIGLU_LIMIT
from engine.model.ops.cpu.kernel import (
    CpuKernel,
    TokenCount,
    as_bf16,
    as_f32,
    constants,
    device_function,
    each_dtype,
    empty,
    exp,
    kernel,
    load,
    store,
    work,
)

TOKENS = 2  # tokens that a thread takes at a time


@device_function
def silu_mul_rows(cast: Any, args: Any) -> None:
    x, out = cast(args[1]), cast(args[2])
    tokens, size = args[3], args[4]
    one = np.float32(1.0)
    for token in work(args, tokens, TOKENS):
        gate, value = 2 * token * size, (2 * token + 1) * size
        for i in range(size):
            g = load(x, gate + i)
            store(out, token * size + i, g / (one + exp(-g)) * load(x, value + i))


@device_function
def gelu_tanh_mul_rows(cast: Any, args: Any) -> None:
    """Multiply values by GELU of gates: g * (1 + tanh(u)) / 2 is computed as g * sigmoid(2 * u)."""
    x, out = cast(args[1]), cast(args[2])
    tokens, size = args[3], args[4]
    one, slope, cube = np.float32(1.0), np.float32(-2 * sqrt(2 / pi)), np.float32(0.044715)
    for token in work(args, tokens, TOKENS):
        gate, value = 2 * token * size, (2 * token + 1) * size
        for i in range(size):
            g = load(x, gate + i)
            gelu = g / (one + exp(slope * (g + cube * g * g * g)))
            store(out, token * size + i, gelu * load(x, value + i))


@device_function
def swigluoai_mul_rows(cast: Any, args: Any) -> None:
    x, out = cast(args[1]), cast(args[2])
    tokens, size = args[3], args[4]
    one, alpha, limit = np.float32(1.0), np.float32(SWIGLU_ALPHA), np.float32(SWIGLU_LIMIT)
    for token in work(args, tokens, TOKENS):
        for i in range(token * size, (token + 1) * size):
            gate = min(load(x, 2 * i), limit)
            value = min(max(load(x, 2 * i + 1), -limit), limit)
            store(out, i, gate / (one + exp(-alpha * gate)) * (value + one))


SILU_MUL = each_dtype(silu_mul_rows)
GELU_TANH_MUL = each_dtype(gelu_tanh_mul_rows)
SWIGLUOAI_MUL = each_dtype(swigluoai_mul_rows)


@device_function
def relu2_rows(cast: Any, args: Any) -> None:
    x, out = cast(args[1]), cast(args[2])
    tokens, size = args[3], args[4]
    for token in work(args, tokens, TOKENS):
        for i in range(token * size, (token + 1) * size):
            value = max(load(x, i), np.float32(0.0))
            store(out, i, value * value)


@device_function
def product_rows(cast: Any, args: Any) -> None:
    """Multiply x by y, or by the sigmoid of y. args: x, y, out, tokens, heads, size, stride from token to token of x,
    strides from token to token, from head to head and from value to value of y, 1 if sigmoids are taken."""
    x, y, out = cast(args[1]), cast(args[2]), cast(args[3])
    tokens, heads, size, x_stride, y_stride, y_head = args[4], args[5], args[6], args[7], args[8], args[9]
    y_value = args[10]
    one = np.float32(1.0)
    for token in work(args, tokens, TOKENS):
        for head in range(heads):
            a, b = token * x_stride + head * size, token * y_stride + head * y_head
            target = (token * heads + head) * size
            for i in range(size):
                factor = load(y, b + i * y_value)
                if args[11]:
                    factor = one / (one + exp(-factor))
                store(out, target + i, load(x, a + i) * factor)


@device_function
def scaled_rows(cast: Any, cast_out: Any, args: Any) -> None:
    """Multiply by a number. args: x, out, the number, tokens, size, x's stride."""
    x, out, factor, tokens, size, stride = (
        cast(args[1]), cast_out(args[2]), as_f32(args[3])[0], args[4], args[5], args[6]
    )  # fmt: skip
    for token in work(args, tokens, TOKENS):
        for i in range(size):
            store(out, token * size + i, load(x, token * stride + i) * factor)


@kernel
def scaled_bf16(args: Any) -> None:
    scaled_rows(as_bf16, as_bf16, args)


@kernel
def scaled_f32(args: Any) -> None:
    scaled_rows(as_f32, as_f32, args)


@kernel
def narrowed(args: Any) -> None:
    scaled_rows(as_f32, as_bf16, args)


@kernel
def widened(args: Any) -> None:
    scaled_rows(as_bf16, as_f32, args)


SCALED = CpuKernel({torch.bfloat16: scaled_bf16, torch.float32: scaled_f32})
CONVERTED = CpuKernel({torch.bfloat16: widened, torch.float32: narrowed})  # by the dtype of x
RELU2 = each_dtype(relu2_rows)
PRODUCT = each_dtype(product_rows)


def silu_mul(x: Tensor) -> Tensor:
    return gated(SILU_MUL, x)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    return gated(GELU_TANH_MUL, x)


def swigluoai_mul(x: Tensor) -> Tensor:
    return gated(SWIGLUOAI_MUL, x)


def gated(op: CpuKernel, x: Tensor) -> Tensor:
    tokens, size = x.shape[0], x.shape[1] // 2
    out = empty((tokens, size), x.dtype)
    op.launch(x.dtype, -(-tokens // TOKENS), x, out, TokenCount(tokens), size)
    return out


def relu2(x: Tensor) -> Tensor:
    out = empty(x.shape, x.dtype)
    RELU2.launch(x.dtype, -(-len(x) // TOKENS), x, out, TokenCount(len(x)), x.shape[1])
    return out


def scaled(x: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    (tokens, size), op = x.shape, SCALED if x.dtype == dtype else CONVERTED
    out = empty(x.shape, dtype)
    op.launch(x.dtype, -(-tokens // TOKENS), x, out, constants(factor), TokenCount(tokens), size, x.stride(0))
    return out


def multiply(x: Tensor, y: Tensor) -> Tensor:
    return product(x, y[:, None], 0)


def open_gate(x: Tensor, gate: Tensor) -> Tensor:
    return product(x, gate, 1)


def product(x: Tensor, y: Tensor, by_sigmoid: int) -> Tensor:
    """Multiply x by y, or by the sigmoid of y. x: [tokens, n], each token's values contiguous; y: [tokens, heads, n /
    heads], with any strides."""
    tokens, heads, size = y.shape
    out = empty(x.shape, x.dtype)
    PRODUCT.launch(
        x.dtype, -(-tokens // TOKENS), x, y, out, TokenCount(tokens), heads, size, x.stride(0), y.stride(0),
        y.stride(1), y.stride(2), by_sigmoid,
    )  # fmt: skip
    return out
