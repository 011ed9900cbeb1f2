"""The product of a few rows with a weight that oneDNN has packed, in bfloat16: AVX-512's dot products of pairs, summed
in the order of oneDNN's own kernel, so that a row has the same bits whichever of the two computes it.

The packed weight is [outputs / 64, inputs / 2, 64, 2]: a column of 64 outputs lies in one piece, in the order in which
it is read. What makes this one faster for few rows is all around the product: no descriptors to look up, work that goes
to whichever thread is free, and a place in a graph (graph.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from engine.model.ops.cpu.kernel import I32, I64, Kernel, TokenCount, as_bf16, empty, kernel, take
from engine.model.ops.cpu.vector import BF16, LANES, VF32, VI32, constant, load16

VECTORS = 4
COLUMN = VECTORS * LANES  # outputs of one piece of a packed weight
TRIED_COLUMNS = 64  # wider weights are summed alike
BLOCKS = (512, 1024, 2**30)  # inputs that oneDNN may sum at a time
PAIRS = ir.VectorType(BF16, 2 * LANES)
U16P = types.CPointer(types.uint16)


def multiply_tile(rows: int) -> Any:
    """The product of `rows` rows with a column, whose sums stay in registers."""

    @intrinsic
    def tile(
        _: Any, out: Any, out_stride: Any, x: Any, x_stride: Any, column: Any, bias: Any, inputs: Any, block: Any
    ) -> Any:
        """out[r, c] = bias[c] + sum over i < inputs of x[r, i] * column[i, c]. Sums start anew with every `block`
        inputs, and are added up. bias: a null pointer if there is none."""

        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
            target, target_stride, left, left_stride, right, offset, size, length = args
            dot = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(VF32, [VF32, PAIRS, PAIRS]), "llvm.x86.avx512bf16.dpbf16ps.512"
            )

            def number(value: int) -> ir.Constant:
                return ir.Constant(I64, value)

            left, right = builder.bitcast(left, I32.as_pointer()), builder.bitcast(right, PAIRS.as_pointer())
            size, length, left_stride = (builder.sdiv(value, number(2)) for value in (size, length, left_stride))
            places = [(row, vector) for row in range(rows) for vector in range(VECTORS)]
            totals = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in places]
            sums = [cgutils.alloca_once(builder, VF32) for _ in places]
            with cgutils.for_range_slice(builder, number(0), size, length, intp=I64) as (start, _n):
                for partial in sums:
                    builder.store(constant(0.0), partial)
                stop = builder.add(start, length)
                stop = builder.select(builder.icmp_signed("<", stop, size), stop, size)
                with cgutils.for_range_slice(builder, start, stop, number(1), intp=I64) as (i, _n):
                    first = builder.mul(i, number(VECTORS))
                    some = [
                        builder.load(builder.gep(right, [builder.add(first, number(vector))]), align=2)
                        for vector in range(VECTORS)
                    ]
                    for row in range(rows):
                        index = builder.add(builder.mul(left_stride, number(row)), i)
                        pair = builder.load(builder.gep(left, [index]), align=2)
                        lane = builder.insert_element(ir.Constant(VI32, ir.Undefined), pair, ir.Constant(I32, 0))
                        pairs = builder.shuffle_vector(lane, lane, ir.Constant(VI32, [0] * LANES))
                        pairs = builder.bitcast(pairs, PAIRS)
                        for column, partial in zip(some, sums[row * VECTORS : (row + 1) * VECTORS], strict=True):
                            builder.store(builder.call(dot, [builder.load(partial), pairs, column]), partial)
                for partial, total in zip(sums, totals, strict=True):
                    builder.store(builder.fadd(builder.load(total), builder.load(partial)), total)
            has_bias = builder.icmp_signed("!=", builder.ptrtoint(offset, I64), number(0))
            with builder.if_then(has_bias):
                for (_row, vector), total in zip(places, totals, strict=True):
                    addend = load16(builder, offset, number(vector * LANES), types.uint16)
                    builder.store(builder.fadd(builder.load(total), addend), total)
            for (row, vector), total in zip(places, totals, strict=True):
                index = builder.add(builder.mul(target_stride, number(row)), number(vector * LANES))
                value = builder.fptrunc(builder.load(total), ir.VectorType(BF16, LANES))
                address = builder.bitcast(builder.gep(target, [index]), value.type.as_pointer())
                builder.store(value, address, align=2)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(U16P, i64, U16P, i64, U16P, U16P, i64, i64), generate

    return tile


six_rows, two_rows, one_row = multiply_tile(6), multiply_tile(2), multiply_tile(1)


@kernel
def multiply_bf16(args: Any) -> None:
    rows, inputs, outputs, x_stride, block = args[5], args[6], args[7], args[8], args[9]
    while True:
        first = take(args, 1) * COLUMN
        if first >= outputs:
            break
        column, bias = as_bf16(args[2] + 2 * first * inputs), as_bf16(args[3] + 2 * first if args[3] else 0)
        row = 0
        while row < rows:
            x, out = as_bf16(args[1] + 2 * row * x_stride), as_bf16(args[4] + 2 * (row * outputs + first))
            if rows - row >= 6:
                six_rows(out, outputs, x, x_stride, column, bias, inputs, block)
                row += 6
            elif rows - row >= 2:
                two_rows(out, outputs, x, x_stride, column, bias, inputs, block)
                row += 2
            else:
                one_row(out, outputs, x, x_stride, column, bias, inputs, block)
                row += 1


MULTIPLY = Kernel({torch.bfloat16: multiply_bf16} if torch.cpu._is_avx512_bf16_supported() else {})


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, *, block: int) -> Tensor:
    """x: [tokens, inputs], each token's values contiguous; weight: packed, [outputs, inputs]."""
    outputs, inputs = weight.shape
    out = empty((len(x), outputs), x.dtype)
    MULTIPLY.launch(
        x.dtype, outputs // COLUMN, x, torch.ops.mkldnn.data_ptr(weight), 0 if bias is None else bias, out,
        TokenCount(len(x)), inputs, outputs, x.stride(0), block,
    )  # fmt: skip
    return out


def select(outputs: int, inputs: int) -> partial[Tensor] | None:
    """Return `multiply` with as many inputs at a time as oneDNN sums in products with a weight of this shape, found by
    trying; None if it packs such a weight, or sums, in another way than the kernel.

    The products tried are zeros but for what float32 rounds off, so that another order gives other numbers.
    """
    if outputs % COLUMN or inputs % (2 * LANES):
        return None
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(COLUMN, inputs // 2, generator=generator)
    order = torch.randperm(inputs // 2, generator=generator)
    x = torch.randn(8, inputs // 2, generator=generator)
    x = torch.cat((x, x[:, order]), dim=1).bfloat16()
    column = torch.cat((half, -half[:, order]), dim=1).bfloat16()
    weight = torch.ops.mkldnn._reorder_linear_weight(column.repeat(min(outputs // COLUMN, TRIED_COLUMNS), 1))
    expected = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    products = (partial(multiply, block=block) for block in BLOCKS)
    return next((product for product in products if torch.equal(product(x, weight, None), expected)), None)
