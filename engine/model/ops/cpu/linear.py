"""Products of any number of rows with a weight in bfloat16 or float32.

bfloat16 is multiplied in AMX's registers (amx.py), else in pairs by AVX-512's dot products. CPUs with neither multiply
single values as float32.

A packed weight is [outputs / 64, inputs / 2, 64, 2] in bfloat16, and [outputs / 64, inputs, 64, 1] in float32. The
weights of 64 outputs form a column, which is contiguous in the order in which it is read. A thread multiplies all rows
by one column, a few rows at a time. Meanwhile it prefetches its next column, so that reading memory and computing
overlap. Each output is one sum in the order of the inputs, so a row has the same bits in any batch. If a weight is cut
into parts along its inputs, the parts are stacked, and one call multiplies all of them. Their products are added up as
described in ops/tree_sum.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from engine.model.ops.cpu.kernel import (
    I32,
    I64,
    TokenCount,
    as_f32,
    device_function,
    each_dtype,
    empty,
    load,
    store,
    take,
    work,
)
from engine.model.ops.cpu.tiles import amx
from engine.model.ops.cpu.tiles.amx import HAS_AMX, VECTORS
from engine.model.ops.cpu.vector import (
    BF16,
    CACHE_LINE_BYTES,
    HAS_BF16,
    LANES,
    VF32,
    VI32,
    constant,
    load16,
    prefetch_line,
    splat,
    store16,
)

COLUMN = VECTORS * LANES  # outputs of a column of a packed weight
STEP_INPUTS = {torch.bfloat16: 2, torch.float32: 1}  # inputs that a tile multiplies at a time
STEP_BYTES = 4 * COLUMN  # bytes of a column for these inputs
BLOCK_ROWS = 384  # rows that a thread takes at a time and that fit into its cache
# rows of a tile -> vectors of a column that it takes at a time, as many as there are registers for: 32 of AVX-512, or
# 16 of AVX2, which are half as long
TILE_VECTORS = {6: 4, 4: 4, 2: 4, 1: 4} if HAS_BF16 else {4: 1, 2: 2, 1: 4}
MAX_ROWS = max(TILE_VECTORS)
PAIRS = ir.VectorType(BF16, 2 * LANES)
STEP_LINES = amx.STEP // 2 * STEP_BYTES // CACHE_LINE_BYTES  # cache lines of a column for the inputs of a step of AMX
PARTS = 8  # number of parts that `sum_8` adds up
TOKENS = 2  # tokens of a sum that a thread takes at a time


def multiply_tile(rows: int) -> Any:
    """Return an intrinsic that multiplies `rows` rows with a column, TILE_VECTORS at a time, with sums in registers."""

    @intrinsic
    def tile(
        _: Any, out: Any, out_stride: Any, x: Any, x_stride: Any, column: Any, bias: Any, inputs: Any, ahead: Any,
        pace: Any,
    ) -> Any:  # fmt: skip
        """Compute out[r, c] = bias[c] + sum over i < inputs of x[r, i] * column[i, c]. bias: a null pointer if there is
        none. out: of x's type or float32. Each step prefetches `pace` bytes, beginning at the address `ahead`."""
        dtype, out_dtype = x.dtype, out.dtype

        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
            target, target_stride, left, left_stride, right, offset, size, wanted, wanted_bytes = args
            pairs = dtype == types.uint16

            def number(value: int) -> ir.Constant:
                return ir.Constant(I64, value)

            right = builder.bitcast(right, VI32.as_pointer())
            left = builder.bitcast(left, I32.as_pointer())
            if pairs:
                size, left_stride = (builder.sdiv(value, number(2)) for value in (size, left_stride))
            starts = [builder.gep(left, [builder.mul(left_stride, number(row))]) for row in range(rows)]
            has_bias = builder.icmp_signed("!=", builder.ptrtoint(offset, I64), number(0))
            for start in range(0, VECTORS, TILE_VECTORS[rows]):
                vectors = range(start, start + TILE_VECTORS[rows])
                sums = [[cgutils.alloca_once_value(builder, constant(0.0)) for _ in vectors] for _ in starts]
                with cgutils.for_range(builder, size, intp=I64) as loop:
                    first = builder.mul(loop.index, number(VECTORS))
                    words = [
                        builder.load(builder.gep(right, [builder.add(first, number(v))]), align=dtype.bitwidth // 8)
                        for v in vectors
                    ]
                    if not start:
                        line = builder.add(wanted, builder.mul(loop.index, wanted_bytes))
                        # many tiles would prefetch the same line again and again, which costs float32 a third of its
                        # speed
                        min_bytes = number(0 if pairs else CACHE_LINE_BYTES)
                        with builder.if_then(builder.icmp_signed(">=", wanted_bytes, min_bytes)):
                            prefetch_lines(builder, line, wanted_bytes)
                    for row, row_sums in zip(starts, sums, strict=True):
                        value = builder.load(builder.gep(row, [loop.index]), align=dtype.bitwidth // 8)
                        value = splat(builder, value)
                        for some, total in zip(words, row_sums, strict=True):
                            builder.store(add_product(builder, builder.load(total), value, some, pairs), total)
                with builder.if_then(has_bias):
                    for i, vector in enumerate(vectors):
                        addend = load16(builder, offset, number(vector * LANES), dtype)
                        for row_sums in sums:
                            builder.store(builder.fadd(builder.load(row_sums[i]), addend), row_sums[i])
                for row, row_sums in enumerate(sums):
                    for vector, total in zip(vectors, row_sums, strict=True):
                        index = builder.add(builder.mul(target_stride, number(row)), number(vector * LANES))
                        store16(builder, builder.load(total), target, index, out_dtype)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(out, i64, x, i64, column, bias, i64, i64, i64), generate

    return tile


def add_product(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value, pairs: bool) -> ir.Value:
    """Return total + a * b for vectors of 16 words. A word is a float32 or a pair of bfloat16."""
    if pairs and HAS_BF16:
        signature = ir.FunctionType(VF32, [VF32, PAIRS, PAIRS])
        product = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512bf16.dpbf16ps.512")
        return builder.call(product, [total, builder.bitcast(a, PAIRS), builder.bitcast(b, PAIRS)])
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(VF32, [VF32] * 3), "llvm.fma.v16f32")
    factors = [(a, b)]
    if pairs:
        half, high = ir.Constant(VI32, [16] * LANES), ir.Constant(VI32, [0xFFFF0000] * LANES)
        factors = [(builder.shl(a, half), builder.shl(b, half)), (builder.and_(a, high), builder.and_(b, high))]
    for x, y in factors:
        total = builder.call(fma, [builder.bitcast(x, VF32), builder.bitcast(y, VF32), total])
    return total


def prefetch_lines(builder: ir.IRBuilder, address: ir.Value, size: ir.Value) -> None:
    """Prefetch the cache lines of `size` bytes, at most STEP_BYTES, from an address on."""

    def ask(line: int) -> None:
        line_address = builder.add(address, ir.Constant(I64, line * CACHE_LINE_BYTES))
        prefetch_line(builder, builder.inttoptr(line_address, ir.IntType(8).as_pointer()))

    ask(0)
    with builder.if_then(builder.icmp_signed(">", size, ir.Constant(I64, CACHE_LINE_BYTES))):
        ask(1)
        with builder.if_then(builder.icmp_signed(">", size, ir.Constant(I64, 2 * CACHE_LINE_BYTES))):
            ask(2)
            ask(3)


multiply_max, multiply_4, multiply_2, multiply_1 = (multiply_tile(rows) for rows in (MAX_ROWS, 4, 2, 1))


@device_function
def rows_at_once(left: int) -> int:
    """Return how many rows the next tile takes. left: rows that remain."""
    return MAX_ROWS if left >= MAX_ROWS and left != 8 else 4 if left >= 4 else 2 if left >= 2 else 1


@device_function
def multiply_rows(
    cast: Any, cast_out: Any, item_bytes: Any, out_bytes: Any, x: Any, x_stride: Any, out: Any, out_stride: Any,
    row: Any, end: Any, column: Any, bias: Any, inputs: Any, ahead: Any,
) -> None:  # fmt: skip
    """Multiply rows [row, end) of x with a column, and write them to the same rows of out. x, out: addresses of the
    first row; column, bias: pointers. Meanwhile prefetches the column at the address `ahead`."""
    if HAS_AMX and item_bytes == 2:
        multiply_in_registers(
            cast, cast_out, out_bytes, x, x_stride, out, out_stride, row, end, column, bias, inputs, ahead
        )
        return
    rest = (end - row) % MAX_ROWS
    tiles = (end - row) // MAX_ROWS + rest // 4 + rest % 4 // 2 + rest % 2
    pace = STEP_BYTES // tiles  # each tile prefetches a part
    while row < end:
        left, target = cast(x + item_bytes * row * x_stride), cast_out(out + out_bytes * row * out_stride)
        count = rows_at_once(end - row)
        if count == MAX_ROWS:
            multiply_max(target, out_stride, left, x_stride, column, bias, inputs, ahead, pace)
        elif count == 4:
            multiply_4(target, out_stride, left, x_stride, column, bias, inputs, ahead, pace)
        elif count == 2:
            multiply_2(target, out_stride, left, x_stride, column, bias, inputs, ahead, pace)
        else:
            multiply_1(target, out_stride, left, x_stride, column, bias, inputs, ahead, pace)
        row += count
        ahead += inputs // (4 // item_bytes) * pace


@device_function
def multiply_in_registers(
    cast: Any, cast_out: Any, out_bytes: Any, x: Any, x_stride: Any, out: Any, out_stride: Any, row: Any, end: Any,
    column: Any, bias: Any, inputs: Any, ahead: Any,
) -> None:  # fmt: skip
    """Do what `multiply_rows` does for bfloat16, by AMX."""
    lines = max(1, STEP_LINES * amx.ROWS // (end - row + amx.ROWS - 1))  # each tile prefetches a part
    configured = 0
    while row < end:
        count = min(end - row, amx.ROWS)
        if count != configured:
            amx.configure(count, inputs)
            configured = count
        left, target = cast(x + 2 * row * x_stride), cast_out(out + out_bytes * row * out_stride)
        amx.multiply_16(target, out_stride, left, x_stride, column, bias, inputs, count, ahead, lines)
        row += count
        ahead += inputs // amx.STEP * lines * CACHE_LINE_BYTES
    amx.release()


@device_function
def multiply_columns(cast: Any, cast_out: Any, item_bytes: Any, out_bytes: Any, args: Any) -> None:
    rows, inputs, outputs, part_outputs, x_stride = args[5], args[6], args[7], args[8], args[9]
    x_part, out_stride, out_part = args[10], args[11], args[12]
    columns = outputs // COLUMN
    items = columns * ((rows + BLOCK_ROWS - 1) // BLOCK_ROWS)
    item = take(args, 1)
    while item < items:
        following = take(args, 1)
        first, row = item % columns * COLUMN, item // columns * BLOCK_ROWS
        end = min(row + BLOCK_ROWS, rows)
        part = first // part_outputs
        x = args[1] + item_bytes * part * x_part
        out = args[4] + out_bytes * (part * out_part + first % part_outputs)
        column, bias = cast(args[2] + item_bytes * first * inputs), cast(args[3] + item_bytes * first if args[3] else 0)
        ahead = args[2] + item_bytes * (following % columns * COLUMN if following < items else first) * inputs
        multiply_rows(
            cast, cast_out, item_bytes, out_bytes, x, x_stride, out, out_stride, row, end, column, bias, inputs, ahead
        )
        item = following


@device_function
def multiply_all(cast: Any, item_bytes: Any, args: Any) -> None:
    multiply_columns(cast, cast, item_bytes, item_bytes, args)


@device_function
def multiply_wide(cast: Any, item_bytes: Any, args: Any) -> None:
    multiply_columns(cast, as_f32, item_bytes, 4, args)


MULTIPLY, MULTIPLY_WIDE = each_dtype(multiply_all), each_dtype(multiply_wide)


def supports(weight: Tensor) -> bool:
    outputs, inputs = weight.shape
    return weight.dtype in MULTIPLY.entries and not outputs % COLUMN and not inputs % STEP_INPUTS[weight.dtype]


def pack(weight: Tensor) -> Tensor:
    """Rearrange a weight: [outputs, inputs] -> [outputs / 64, inputs / n, 64, n], n being the inputs of a step."""
    MULTIPLY.compile(weight.dtype)  # now, and not in the first step
    size = STEP_INPUTS[weight.dtype]
    return weight.view(-1, COLUMN, weight.shape[1] // size, size).transpose(1, 2).contiguous()


def packed_rows(weight: Tensor, rows: Tensor) -> Tensor:
    """Return the weights of the given outputs, [len(rows), inputs], from a packed weight."""
    return weight[rows // COLUMN, :, rows % COLUMN].flatten(1)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int = 1, wide: bool = False) -> Tensor:
    """Return the product, [tokens, outputs]. x: [tokens, inputs], each token's values contiguous. weight: packed; if it
    has several parts, each multiplies its part of the inputs, and the products are concatenated. wide: whether to
    return the sums as they are, in float32, and not in x's type."""
    outputs, inputs = weight.shape[0] * COLUMN, weight.shape[1] * weight.shape[3]
    out = empty((len(x), outputs), torch.float32 if wide else x.dtype)
    (MULTIPLY_WIDE if wide else MULTIPLY).launch(
        x.dtype, len(weight) * -(-len(x) // BLOCK_ROWS), x, weight, 0 if bias is None else bias, out,
        TokenCount(len(x)), inputs, outputs, outputs // parts, x.stride(0), inputs, outputs, outputs // parts,
    )  # fmt: skip
    return out


def multiply_heads(x: Tensor, weight: Tensor, width: int) -> Tensor:
    """Multiply each head by its own weight: [tokens, heads, inputs] -> [tokens, heads, width]. A head's products
    are its first values; the others are uninitialised. x: each head's values contiguous. weight: packed, the weights
    of all heads stacked along the outputs; each has a multiple of COLUMN."""
    (tokens, heads, inputs), outputs = x.shape, weight.shape[0] * COLUMN
    out = empty((tokens, heads, width), x.dtype)
    MULTIPLY.launch(
        x.dtype, len(weight) * -(-tokens // BLOCK_ROWS), x, weight, 0, out, TokenCount(tokens), inputs, outputs,
        outputs // heads, x.stride(0), x.stride(1), heads * width, width,
    )  # fmt: skip
    return out


@device_function
def sum_8_parts(cast: Any, args: Any) -> None:
    a, b, c, d = cast(args[1]), cast(args[2]), cast(args[3]), cast(args[4])
    e, f, g, h = cast(args[5]), cast(args[6]), cast(args[7]), cast(args[8])
    out, tokens, size, stride = cast(args[9]), args[10], args[11], args[12]
    for token in work(args, tokens, TOKENS):
        start = token * stride
        for i in range(size):
            j = start + i
            low = (load(a, j) + load(b, j)) + (load(c, j) + load(d, j))
            high = (load(e, j) + load(f, j)) + (load(g, j) + load(h, j))
            store(out, token * size + i, low + high)


SUM_8 = each_dtype(sum_8_parts)


def sum_8(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of eight tensors as a binary tree. parts: [tokens, size] each, with equal strides."""
    tokens, size = parts[0].shape
    out = empty((tokens, size), parts[0].dtype)
    SUM_8.launch(out.dtype, -(-tokens // TOKENS), *parts, out, TokenCount(tokens), size, parts[0].stride(0))
    return out
