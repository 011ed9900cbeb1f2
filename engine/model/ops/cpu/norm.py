"""RMSNorm on a CPU: one pass over each row for the sum and one for the result."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from engine.model.ops.cpu.kernel import (
    TokenCount,
    as_f32,
    constants,
    device_function,
    each_dtype,
    empty,
    exp,
    load,
    store,
    sum_of_squares,
    work,
)

TOKENS = 4  # tokens that a thread takes at a time


@device_function
def normalise(x: Any, source: Any, weight: Any, out: Any, target: Any, size: Any, numbers: Any) -> None:
    """Write the RMSNorm of x[source : source + size] to out[target : target + size]. numbers: eps and shift."""
    eps, shift = numbers[0], numbers[1]
    scale = np.float32(1.0) / np.sqrt(sum_of_squares(x, source, size) / np.float32(size) + eps)
    for i in range(size):
        store(out, target + i, load(x, source + i) * scale * (shift + load(weight, i)))


@device_function
def rms_norm_rows(cast: Any, args: Any) -> None:
    x, weight, out, numbers = cast(args[1]), cast(args[2]), cast(args[3]), as_f32(args[4])
    tokens, stride, rows, size, row_stride = args[5], args[6], args[7], args[8], args[9]
    for token in work(args, tokens, TOKENS):
        for row in range(rows):
            normalise(x, token * stride + row * row_stride, weight, out, (token * rows + row) * size, size, numbers)


@device_function
def add_rms_norm_rows(cast: Any, args: Any) -> None:
    x, y, weight, total, out, numbers = (
        cast(args[1]), cast(args[2]), cast(args[3]), cast(args[4]), cast(args[5]), as_f32(args[6])
    )  # fmt: skip
    tokens, size = args[7], args[8]
    for token in work(args, tokens, TOKENS):
        start = token * size
        for i in range(start, start + size):
            store(total, i, load(x, i) + load(y, i))
        normalise(total, start, weight, out, start, size, numbers)


@device_function
def gated_rms_norm_rows(cast: Any, args: Any) -> None:
    """Norm each head and multiply it by its gate. args: x, gate, weight, out, `eps`, tokens, heads, size, the gate's
    strides from token to token and from head to head, 1 if the gate passes a sigmoid instead of SiLU."""
    x, gate, weight, out, eps = as_f32(args[1]), cast(args[2]), cast(args[3]), cast(args[4]), as_f32(args[5])[0]
    tokens, heads, size, stride, head_stride, by_sigmoid = args[6], args[7], args[8], args[9], args[10], args[11]
    one = np.float32(1.0)
    for token in work(args, tokens, TOKENS):
        for head in range(heads):
            start, of_gate = (token * heads + head) * size, token * stride + head * head_stride
            scale = one / np.sqrt(sum_of_squares(x, start, size) / np.float32(size) + eps)
            for i in range(size):
                g = load(gate, of_gate + i)
                opened = (one if by_sigmoid else g) / (one + exp(-g))
                store(out, start + i, x[start + i] * scale * load(weight, i) * opened)


RMS_NORM = each_dtype(rms_norm_rows)
ADD_RMS_NORM = each_dtype(add_rms_norm_rows)
GATED_RMS_NORM = each_dtype(gated_rms_norm_rows)


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
    rows = x.shape[1] if x.dim() == 3 else 1
    out = empty(x.shape, x.dtype)
    items = -(-x.shape[0] // TOKENS)
    RMS_NORM.launch(
        x.dtype, items, x, weight, out, constants(eps, shift), TokenCount(x.shape[0]), x.stride(0), rows, x.shape[-1],
        x.stride(-2),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, shift: float) -> tuple[Tensor, Tensor]:
    total, out = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
    tokens, size = x.shape
    ADD_RMS_NORM.launch(
        x.dtype, -(-tokens // TOKENS), x, y, weight, total, out, constants(eps, shift), TokenCount(tokens), size
    )
    return total, out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, by_sigmoid: bool) -> Tensor:
    x, (tokens, heads, size) = x.float().contiguous(), x.shape
    out = empty(x.shape, gate.dtype)
    GATED_RMS_NORM.launch(
        gate.dtype, -(-tokens // TOKENS), x, gate, weight, out, constants(eps), TokenCount(tokens), heads, size,
        gate.stride(0), gate.stride(1), int(by_sigmoid),
    )  # fmt: skip
    return out
