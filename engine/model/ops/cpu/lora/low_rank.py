"""Low-rank products on a CPU: a thread multiplies a few rows of one adapter by 16 columns of a factor at a time.

Weights are read once for all rows of a tile. Weights of adapters that no row has are not read. Each number of the
result is one sum in the order of the inputs, whichever other rows are in its tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from engine.model.low_rank import TILE_ROWS, AdapterRows, LowRankWeights
from engine.model.ops.cpu.kernel import (
    I32,
    I64,
    Kernel,
    as_bf16,
    as_f32,
    as_i32,
    device_function,
    empty,
    kernel,
    load,
    recorder,
    store,
    take,
)
from engine.model.ops.cpu.vector import F32, F32P, LANES, VF32, constant, load16, splat, store16

ROWS = TILE_ROWS["cpu"]
WIDE = 4  # vectors of columns that a row which is alone takes at a time, so that sums do not wait for each other
I32P = types.CPointer(types.int32)


def product(rows: int, vectors: int) -> Any:
    @intrinsic
    def tile(_: Any, out: Any, x: Any, stride: Any, order: Any, first: Any, w: Any, width: Any, count: Any) -> Any:
        """Compute out[r, c] = sum over i < count of x[order[first + r], i] * w[i, c], for `rows` rows and 16 *
        `vectors` columns. stride: numbers per row of x; width: numbers per row of w. A row of `out` has 16 * WIDE
        numbers."""

        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
            target, values, size, index, start, right, right_size, number = args
            fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(VF32, [VF32] * 3), "llvm.fma.v16f32")
            sources = []
            for row in range(rows):
                place = builder.load(builder.gep(index, [builder.add(start, ir.Constant(I64, row))]))
                sources.append(builder.gep(values, [builder.mul(builder.sext(place, I64), size)]))
            sums = [[cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(vectors)] for _ in sources]
            with cgutils.for_range(builder, number, intp=I64) as loop:
                line = builder.mul(loop.index, right_size)
                columns = [builder.add(line, ir.Constant(I64, LANES * v)) for v in range(vectors)]
                some = [load16(builder, right, column, sig.args[5].dtype) for column in columns]
                for source, totals in zip(sources, sums, strict=True):
                    value = builder.load(builder.gep(source, [loop.index]))
                    if sig.args[1].dtype == types.uint16:
                        value = builder.bitcast(builder.shl(builder.zext(value, I32), ir.Constant(I32, 16)), F32)
                    value = splat(builder, value)
                    for vector, total in zip(some, totals, strict=True):
                        builder.store(builder.call(fma, [value, vector, builder.load(total)]), total)
            for row, totals in enumerate(sums):
                for v, total in enumerate(totals):
                    at = ir.Constant(I64, LANES * (WIDE * row + v))
                    store16(builder, builder.load(total), target, at, types.float32)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(F32P, x, i64, I32P, i64, w, i64, i64), generate

    return tile


product_4, product_2, product_1 = product(4, 1), product(2, 1), product(1, 1)
wide_2, wide_1 = product(2, 2), product(1, 4)


@device_function
def multiply(rows: int, out: Any, x: Any, stride: int, order: Any, first: int, w: Any, width: int, count: int) -> None:
    """Compute 16 columns of up to 4 rows, as `product.tile` does."""
    if rows == 4:
        product_4(out, x, stride, order, first, w, width, count)
        return
    done = 0
    if rows >= 2:
        product_2(out, x, stride, order, first, w, width, count)
        done = 2
    if rows > done:
        last = as_f32(out_address(out) + 4 * done * LANES * WIDE)
        product_1(last, x, stride, order, first + done, w, width, count)


@intrinsic
def out_address(_: Any, pointer: Any) -> Any:
    return types.int64(F32P), lambda context, builder, sig, a: builder.ptrtoint(a[0], I64)


@device_function
def shrink_rows(cast: Any, item_bytes: int, args: Any) -> None:
    shrunk, ranks, table = as_f32(args[2]), as_i32(args[4]), as_i32(args[5])
    stride, inputs, parts, slices, rank = args[6], args[7], args[8], args[9], args[10]
    width = slices * rank
    columns, tiles = width // LANES, table[0]
    scratch = np.empty(ROWS * LANES * WIDE, np.float32)
    sums = as_f32(scratch.ctypes.data)
    while True:
        item = take(args, 1)
        if item >= tiles * parts * columns:
            break
        tile, part, column = item // (parts * columns), item // columns % parts, item % columns * LANES
        slot, first, rows = table[1 + 3 * tile], 1 + 3 * tiles + table[2 + 3 * tile], table[3 + 3 * tile]
        if column % rank < ranks[slot]:
            x = cast(args[1] + item_bytes * part * inputs)
            a = cast(args[3] + item_bytes * ((slot * parts + part) * inputs * width + column))
            multiply(rows, sums, x, stride, table, first, a, width, inputs)
            for r in range(rows):
                target = (table[first + r] * parts + part) * width + column
                for c in range(LANES):
                    shrunk[target + c] = sums[r * LANES * WIDE + c]
    scratch[0] = 0.0  # Numba frees an array after its last use, and does not see the pointer into it


@kernel
def shrink_bf16(args: Any) -> None:
    shrink_rows(as_bf16, 2, args)


@kernel
def shrink_f32(args: Any) -> None:
    shrink_rows(as_f32, 4, args)


@device_function
def expand_rows(cast: Any, item_bytes: int, args: Any) -> None:
    out, ranks, table, blocks = cast(args[1]), as_i32(args[4]), as_i32(args[5]), as_i32(args[6])
    num_blocks, stride, rank, outputs, shrunk_stride = args[7], args[8], args[9], args[10], args[11]
    tiles = table[0]
    scratch = np.empty(ROWS * LANES * WIDE, np.float32)
    sums = as_f32(scratch.ctypes.data)
    while True:
        item = take(args, 1)
        if item >= tiles * num_blocks:
            break
        tile, block = item // num_blocks, 4 * (item % num_blocks)
        slot, first, rows = table[1 + 3 * tile], 1 + 3 * tiles + table[2 + 3 * tile], table[3 + 3 * tile]
        if ranks[slot] == 0:
            continue
        start, size, shrunk = blocks[block], blocks[block + 1], as_f32(args[2] + 4 * blocks[block + 2] * rank)
        b = args[3] + item_bytes * (slot * rank * outputs + blocks[block + 3])
        done = 0
        while done < size:
            vectors, factor = 1, cast(b + item_bytes * done)
            if rows == 1 and size - done >= 4 * LANES:
                vectors = 4
                wide_1(sums, shrunk, shrunk_stride, table, first, factor, outputs, ranks[slot])
            elif rows == 2 and size - done >= 2 * LANES:
                vectors = 2
                wide_2(sums, shrunk, shrunk_stride, table, first, factor, outputs, ranks[slot])
            else:
                multiply(rows, sums, shrunk, shrunk_stride, table, first, factor, outputs, ranks[slot])
            for r in range(rows):
                target = table[first + r] * stride + start + done
                for c in range(min(vectors * LANES, size - done)):
                    store(out, target + c, load(out, target + c) + sums[r * LANES * WIDE + c])
            done += vectors * LANES
    scratch[0] = 0.0


@kernel
def expand_bf16(args: Any) -> None:
    expand_rows(as_bf16, 2, args)


@kernel
def expand_f32(args: Any) -> None:
    expand_rows(as_f32, 4, args)


SHRINK = Kernel({torch.bfloat16: shrink_bf16, torch.float32: shrink_f32})
EXPAND = Kernel({torch.bfloat16: expand_bf16, torch.float32: expand_f32})


def add(outs: Sequence[Tensor], x: Tensor, weights: LowRankWeights, rows: AdapterRows) -> None:
    """Add the adapters. x: each token's values contiguous, as in `outs`."""
    if not rows.any and recorder.graph is None:
        return
    parts, (_, rank, outputs) = len(outs), weights.b.shape
    width, inputs = weights.slices * rank, weights.a.shape[1] // parts
    shrunk = empty((len(x), parts * width), torch.float32)
    most = len(x) * max(parts * width // LANES, len(weights.blocks))  # of items; how many there are is in the table
    SHRINK.launch(
        x.dtype, most, x, shrunk, weights.a, weights.ranks, rows.table, x.stride(0), inputs, parts, weights.slices,
        rank,
    )  # fmt: skip
    for part, out in enumerate(outs):
        EXPAND.launch(
            x.dtype, most, out, shrunk[:, part * width :], weights.b, weights.ranks, rows.table, weights.blocks,
            len(weights.blocks), out.stride(0), rank, outputs, parts * width,
        )  # fmt: skip
