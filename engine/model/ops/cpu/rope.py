"""Rotary embedding on a CPU, in place: q and k come from their projection and are not read elsewhere."""

from __future__ import annotations

from typing import Any

import torch
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

TOKENS = 4  # tokens that a thread takes at a time


@device_function
def rotate_head(x: Any, first: int, table: Any, angles: int, half: int) -> None:
    """Rotate the pairs of x[first : first + 2 * half] by table[angles : angles + 2 * half]."""
    for i in range(half):
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
