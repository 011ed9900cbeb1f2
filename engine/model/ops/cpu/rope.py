"""Rotary embedding on a CPU, in place: q and k come fresh from their projection, and nobody else reads them."""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from engine.model.ops.cpu.kernel import (
    Kernel,
    TokenCount,
    as_bf16,
    as_f32,
    as_i64,
    device_function,
    kernel,
    load,
    store,
    take,
)
from engine.model.ops.cpu.vector import FAST, LANES, fma, load16, steps, store16

TOKENS = 4  # taken by a thread at a time


@intrinsic
def rotate_pairs(_: Any, x: Any, first: Any, second: Any, table: Any, cosines: Any, sines: Any, count: Any) -> Any:
    """Rotate the pairs (x[first + i], x[second + i]) by the angles at table[cosines + i] and table[sines + i], for
    i < count, a multiple of 16."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        values, *starts, number = args[0], args[1], args[2], args[4], args[5], args[6]
        dtype = sig.args[0].dtype
        with steps(builder, number) as (i, _count):
            to_a, to_b, at_cos, at_sin = (builder.add(start, i) for start in starts)
            a, b = load16(builder, values, to_a, dtype), load16(builder, values, to_b, dtype)
            cos, sin = load16(builder, args[3], at_cos, dtype), load16(builder, args[3], at_sin, dtype)
            low = builder.fsub(builder.fmul(a, cos, flags=FAST), builder.fmul(b, sin, flags=FAST), flags=FAST)
            store16(builder, low, values, to_a, dtype)
            store16(builder, fma(builder, b, cos, builder.fmul(a, sin, flags=FAST)), values, to_b, dtype)
        return context.get_dummy_value()

    size = types.int64
    return types.void(x, size, size, table, size, size, size), generate


@device_function
def rotate_head(x: Any, first: int, table: Any, angles: int, half: int) -> None:
    """Rotate the pairs of x[first : first + 2 * half] by table[angles : angles + 2 * half]."""
    whole = half // LANES * LANES
    rotate_pairs(x, first, first + half, table, angles, angles + half, whole)
    for i in range(whole, half):
        cos, sin = load(table, angles + i), load(table, angles + half + i)
        a, b = load(x, first + i), load(x, first + half + i)
        store(x, first + i, a * cos - b * sin)
        store(x, first + half + i, b * cos + a * sin)


@device_function
def rotate_rows(cast: Any, args: Any) -> None:
    x, table, positions = cast(args[1]), cast(args[2]), as_i64(args[3])
    tokens, stride, heads, head_dim, half = args[4], args[5], args[6], args[7], args[8]
    while True:
        first = take(args, TOKENS)
        if first >= tokens:
            break
        for token in range(first, min(first + TOKENS, tokens)):
            angles = positions[token] * 2 * half
            for head in range(heads):
                rotate_head(x, token * stride + head * head_dim, table, angles, half)


@kernel
def rotate_bf16(args: Any) -> None:
    rotate_rows(as_bf16, args)


@kernel
def rotate_f32(args: Any) -> None:
    rotate_rows(as_f32, args)


ROTATE = Kernel({torch.bfloat16: rotate_bf16, torch.float32: rotate_f32})


def rotate(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    tokens, heads, head_dim = x.shape
    half = table.shape[1] // 2
    ROTATE.launch(
        x.dtype, -(-tokens // TOKENS), x, table, positions, TokenCount(tokens), x.stride(0), heads, head_dim, half
    )
    return x
