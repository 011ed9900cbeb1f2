"""Low-rank products on a CPU: a thread multiplies up to 4 rows of one adapter by columns of a factor at a time.

bfloat16 is multiplied in pairs by AVX-512's dot products. CPUs without them multiply single values as float32.

A factor lies in memory in the order in which it is read, and only factors of adapters that the rows use are read. While
a thread multiplies, it prefetches what it will read next, since a step with many adapters mostly waits for memory. Each
number of the result is one sum in an order that does not depend on the other rows.
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

from engine.model.low_rank import LANES, AdapterRows, LowRankWeights
from engine.model.ops.cpu.kernel import (
    I32,
    I64,
    as_f32,
    as_i32,
    device_function,
    each_dtype,
    load,
    recorder,
    store,
    take,
)
from engine.model.ops.cpu.linear import PAIRS
from engine.model.ops.cpu.vector import (
    F32,
    HAS_BF16,
    VF32,
    VI16,
    VI32,
    constant,
    load16,
    prefetch_line,
    splat,
    store16,
)

SUMS = 4 if HAS_BF16 else 1  # partial sums, each of every SUMS-th input, so that additions need not wait for each other
# rows of a tile -> columns of B that it takes at a time, as many as there are registers for
VECTORS = {4: 4, 2: 4, 1: 4} if HAS_BF16 else {4: 1, 2: 2, 1: 4}
WIDE_4, WIDE_2, WIDE_1 = (LANES * VECTORS[rows] for rows in (4, 2, 1))
SHARES = 16  # per thread, into which the items of a product with B are divided
INTERLEAVED = [half + lane for lane in range(LANES) for half in (0, LANES)]
I32P = types.CPointer(types.int32)


def product(rows: int, vectors: int, adds: bool = False, sums: int = 1) -> Any:
    @intrinsic
    def tile(
        _: Any, out: Any, out_stride: Any, x: Any, stride: Any, order: Any, first: Any, w: Any, size: Any, count: Any,
        ahead: Any,
    ) -> Any:  # fmt: skip
        """Compute sum over i < count of x[order[first + r], i] * w[i, c], for `rows` rows and LANES * `vectors`
        columns. Write it to out[order[first + r], c], or add it to what is there. out_stride, stride: numbers per row.
        size: numbers of w from one block of LANES columns to the next. ahead: address of the factor to prefetch."""
        pairs = x.dtype == types.uint16 and HAS_BF16

        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
            target, target_stride, values, values_stride, index, start, right, right_size, number, wanted = args
            item_bytes = sig.args[2].dtype.bitwidth // 8
            at_once = 2 if pairs else 1
            fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(VF32, [VF32] * 3), "llvm.fma.v16f32")
            dot = None
            if pairs:
                signature = ir.FunctionType(VF32, [VF32, PAIRS, PAIRS])
                dot = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512bf16.dpbf16ps.512")

            def number_of(value: int) -> ir.Constant:
                return ir.Constant(I64, value)

            places = [builder.load(builder.gep(index, [builder.add(start, number_of(row))])) for row in range(rows)]
            places = [builder.sext(place, I64) for place in places]
            sources = [builder.gep(values, [builder.mul(place, values_stride)]) for place in places]
            totals = [
                [[cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(vectors)] for _ in places]
                for _ in range(sums)
            ]
            columns = [builder.mul(right_size, number_of(vector)) for vector in range(vectors)]

            def add_inputs(i: ir.Value, own: list[list[ir.Value]], single: bool) -> None:
                """Add the products of input i, or of a pair of inputs."""
                factors = []
                for column in columns:
                    offset = builder.add(column, builder.mul(i, number_of(LANES)))
                    if not single:
                        line = builder.add(wanted, builder.mul(offset, number_of(item_bytes)))
                        prefetch_line(builder, builder.inttoptr(line, ir.IntType(8).as_pointer()))
                    factors.append(load_factor(builder, right, offset, sig.args[2].dtype, pairs, single))
                for source, row_totals in zip(sources, own, strict=True):
                    value = splat(builder, load_input(builder, source, i, sig.args[2].dtype, pairs, single))
                    for factor, total in zip(factors, row_totals, strict=True):
                        before = builder.load(total)
                        after = (
                            builder.call(dot, [before, builder.bitcast(value, PAIRS), factor])
                            if pairs
                            else builder.call(fma, [value, factor, before])
                        )
                        builder.store(after, total)

            group = number_of(at_once * sums)
            groups = builder.sdiv(number, group)
            with cgutils.for_range(builder, groups, intp=I64) as loop:
                for part in range(sums):
                    i = builder.add(builder.mul(loop.index, group), number_of(part * at_once))
                    add_inputs(i, totals[part], False)
            done = builder.mul(groups, group)
            if sums > 1:
                rest = builder.sdiv(builder.sub(number, done), number_of(at_once))
                with cgutils.for_range(builder, rest, intp=I64) as loop:
                    i = builder.add(done, builder.mul(loop.index, number_of(at_once)))
                    add_inputs(i, totals[0], False)
            if pairs:
                last = builder.sub(number, number_of(1))
                with builder.if_then(builder.icmp_signed("==", builder.srem(number, number_of(2)), number_of(1))):
                    add_inputs(last, totals[0], True)
            for row, place in enumerate(places):
                for vector in range(vectors):
                    value = builder.load(totals[0][row][vector])
                    for part in range(1, sums):
                        value = builder.fadd(value, builder.load(totals[part][row][vector]))
                    offset = builder.add(builder.mul(place, target_stride), number_of(LANES * vector))
                    if adds:
                        value = builder.fadd(load16(builder, target, offset, sig.args[0].dtype), value)
                    store16(builder, value, target, offset, sig.args[0].dtype)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(out, i64, x, i64, I32P, i64, w, i64, i64, i64), generate

    return tile


def load_factor(
    builder: ir.IRBuilder, factor: ir.Value, offset: ir.Value, dtype: Any, pairs: bool, single: bool
) -> ir.Value:
    """Load 16 columns of an input, or of a pair of inputs. single: the pair has no second input."""
    if not pairs:
        return load16(builder, factor, offset, dtype)
    address = builder.gep(factor, [offset])
    if single:
        values = builder.load(builder.bitcast(address, VI16.as_pointer()), align=2)
        return builder.bitcast(builder.zext(values, VI32), PAIRS)
    both = ir.VectorType(ir.IntType(16), 2 * LANES)
    values = builder.load(builder.bitcast(address, both.as_pointer()), align=2)
    order = ir.Constant(ir.VectorType(I32, 2 * LANES), INTERLEAVED)
    return builder.bitcast(builder.shuffle_vector(values, ir.Constant(both, ir.Undefined), order), PAIRS)


def load_input(builder: ir.IRBuilder, x: ir.Value, i: ir.Value, dtype: Any, pairs: bool, single: bool) -> ir.Value:
    """Load an input as float32, or a pair of inputs as 32 bits. single: the pair has no second input."""
    address = builder.gep(x, [i])
    if pairs and not single:
        return builder.load(builder.bitcast(address, I32.as_pointer()), align=2)
    value = builder.load(address)
    if dtype == types.float32:
        return value
    value = builder.zext(value, I32)
    return value if pairs else builder.bitcast(builder.shl(value, ir.Constant(I32, 16)), F32)


shrink_4, shrink_2, shrink_1 = (product(rows, 1, sums=SUMS) for rows in (4, 2, 1))
expand_4, expand_2, expand_1 = (product(rows, VECTORS[rows], adds=True) for rows in (4, 2, 1))
expand_narrow = product(1, 1)  # sums in the same order as the others, since other ranks may cut a layer elsewhere


@device_function
def rows_at_once(left: int) -> int:
    return 4 if left >= 4 else 2 if left >= 2 else 1


@device_function
def shrink_rows(cast: Any, item_bytes: int, args: Any) -> None:
    ranks, table = as_i32(args[4]), as_i32(args[5])
    stride, inputs, parts, slices, rank = args[6], args[7], args[8], args[9], args[10]
    width, tiles = slices * rank, table[0]
    items = tiles * parts * (width // LANES)
    size = item_bytes * parts * inputs  # bytes of a column of A
    item = take(args, 1)
    while item < items:
        following = take(args, 1)
        tile, part, column = item % tiles, item // tiles % parts, item // (tiles * parts) * LANES
        slot, first, rows = table[1 + 3 * tile], 1 + 3 * tiles + table[2 + 3 * tile], table[3 + 3 * tile]
        a = args[3] + size * (slot * width + column) + item_bytes * LANES * part * inputs
        ahead = a
        if following < items:
            ahead = args[3] + size * (table[1 + 3 * (following % tiles)] * width + following // (tiles * parts) * LANES)
            ahead += item_bytes * LANES * (following // tiles % parts) * inputs
        if column % rank < ranks[slot]:
            x, factor = cast(args[1] + item_bytes * part * inputs), cast(a)
            out = cast(args[2] + item_bytes * (part * width + column))
            while rows > 0:
                count = rows_at_once(rows)
                if count == 4:
                    shrink_4(out, parts * width, x, stride, table, first, factor, 0, inputs, ahead)
                elif count == 2:
                    shrink_2(out, parts * width, x, stride, table, first, factor, 0, inputs, ahead)
                else:
                    shrink_1(out, parts * width, x, stride, table, first, factor, 0, inputs, ahead)
                first, rows = first + count, rows - count
        item = following


@device_function
def expand_rows(cast: Any, item_bytes: int, args: Any) -> None:
    """Add B to the outputs. An item is a block of outputs of one tile, and its factor begins where the previous block's
    factor ends. A thread takes several items at a time, since each is short."""
    ranks, table, blocks = as_i32(args[4]), as_i32(args[5]), as_i32(args[6])
    num_blocks, stride, rank, outputs, shrunk_stride = args[7], args[8], args[9], args[10], args[11]
    tiles = table[0]
    items = tiles * num_blocks
    share = 1 + items // args[12]
    scratch = np.empty(LANES, np.float32)
    sums = as_f32(scratch.ctypes.data)
    item = take(args, share)
    while item < items:
        following = take(args, share)
        tile, number = item // num_blocks, item % num_blocks
        last = min(item + share, items) - 1
        while item <= last:
            slot, first, rows = table[1 + 3 * tile], 1 + 3 * tiles + table[2 + 3 * tile], table[3 + 3 * tile]
            start, size, used = blocks[4 * number], blocks[4 * number + 1], ranks[slot]
            shrunk = cast(args[2] + item_bytes * blocks[4 * number + 2] * rank)
            b = args[3] + item_bytes * (slot * outputs + blocks[4 * number + 3]) * rank
            number += 1
            if number == num_blocks:
                tile, number = tile + 1, 0
            ahead = b
            if item < last:
                ahead = args[3] + item_bytes * (table[1 + 3 * tile] * outputs + blocks[4 * number + 3]) * rank
            elif following < items:
                column = blocks[4 * (following % num_blocks) + 3]
                ahead = args[3] + item_bytes * (table[1 + 3 * (following // num_blocks)] * outputs + column) * rank
            while rows > 0 and used > 0:
                count, done = rows_at_once(rows), 0
                wide = WIDE_4 if count == 4 else WIDE_2 if count == 2 else WIDE_1
                while size - done >= wide:
                    out, skipped = cast(args[1] + item_bytes * (start + done)), item_bytes * done * rank
                    factor, later = cast(b + skipped), ahead + skipped
                    if count == 4:
                        expand_4(out, stride, shrunk, shrunk_stride, table, first, factor, rank * LANES, used, later)
                    elif count == 2:
                        expand_2(out, stride, shrunk, shrunk_stride, table, first, factor, rank * LANES, used, later)
                    else:
                        expand_1(out, stride, shrunk, shrunk_stride, table, first, factor, rank * LANES, used, later)
                    done += wide
                while done < size:  # less than `wide` is left
                    out, skipped = cast(args[1] + item_bytes * (start + done)), item_bytes * done * rank
                    for i in range(first, first + count):
                        factor, later = cast(b + skipped), ahead + skipped
                        expand_narrow(sums, 0, shrunk, shrunk_stride, table, i, factor, 0, used, later)
                        target = table[i] * stride
                        for c in range(min(LANES, size - done)):
                            store(out, target + c, load(out, target + c) + sums[c])
                    done += LANES
                first, rows = first + count, rows - count
            item += 1
        item = following
    scratch[0] = 0.0  # Numba frees an array after its last use, and does not see the pointer into it


SHRINK = each_dtype(shrink_rows)
EXPAND = each_dtype(expand_rows)


def add(outs: Sequence[Tensor], x: Tensor, weights: LowRankWeights, rows: AdapterRows) -> None:
    """Add the adapters. x: each token's values contiguous, as in `outs`."""
    if not rows.any and recorder.graph is None:
        return
    parts, (_, columns, rank, _) = len(outs), weights.b.shape
    width, inputs = weights.slices * rank, weights.a.shape[2] // parts
    shrunk = rows.scratch(parts * width, x.dtype)  # not memory that the layer's product may still read
    if recorder.graph is not None:
        recorder.graph.run_beside()  # threads without work in the layer's product begin with this
    most = len(x) * max(parts * width // LANES, len(weights.blocks))  # limit on items; the table has their number
    SHRINK.launch(
        x.dtype, most, x, shrunk, weights.a, weights.ranks, rows.table, x.stride(0), inputs, parts, weights.slices,
        rank,
    )  # fmt: skip
    for part, out in enumerate(outs):
        EXPAND.launch(
            x.dtype, most, out, shrunk[:, part * width :], weights.b, weights.ranks, rows.table, weights.blocks,
            len(weights.blocks), out.stride(0), rank, columns * LANES, parts * width, SHARES * torch.get_num_threads(),
        )  # fmt: skip
