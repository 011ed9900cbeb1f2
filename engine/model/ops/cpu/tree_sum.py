"""The sum of eight tensors on a CPU. See ops/tree_sum.py."""

from __future__ import annotations

from collections.abc import Sequence
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
    device_function,
    empty,
    kernel,
    load,
    store,
    take,
)
from engine.model.ops.cpu.tile_product import CONTRACT

PARTS = 8
TOKENS = 2  # taken by a thread at a time


@intrinsic
def add(_: Any, a: Any, b: Any) -> Any:
    """a + b, which is never reassociated."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.fadd(args[0], args[1], flags=CONTRACT)

    return types.float32(types.float32, types.float32), generate


@device_function
def sum_8_parts(cast: Any, args: Any) -> None:
    a, b, c, d = cast(args[1]), cast(args[2]), cast(args[3]), cast(args[4])
    e, f, g, h = cast(args[5]), cast(args[6]), cast(args[7]), cast(args[8])
    out, tokens, size = cast(args[9]), args[10], args[11]
    while True:
        first = take(args, TOKENS)
        if first >= tokens:
            break
        for i in range(first * size, min(first + TOKENS, tokens) * size):
            low = add(add(load(a, i), load(b, i)), add(load(c, i), load(d, i)))
            high = add(add(load(e, i), load(f, i)), add(load(g, i), load(h, i)))
            store(out, i, add(low, high))


@kernel
def sum_8_bf16(args: Any) -> None:
    sum_8_parts(as_bf16, args)


@kernel
def sum_8_f32(args: Any) -> None:
    sum_8_parts(as_f32, args)


SUM_8 = Kernel({torch.bfloat16: sum_8_bf16, torch.float32: sum_8_f32})


def sum_8(parts: Sequence[Tensor]) -> Tensor:
    tokens, size = parts[0].shape
    out = empty((tokens, size), parts[0].dtype)
    SUM_8.launch(out.dtype, -(-tokens // TOKENS), *parts, out, TokenCount(tokens), size)
    return out
