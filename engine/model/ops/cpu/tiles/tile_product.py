"""Products of small matrices, whose sums stay in registers: float32, or bfloat16 with sums in float32.

Matrices consist of words of 32 bits: a float32, or two bfloat16 that are adjacent along the axis of summation. The
product of two words is the sum of the products of their elements, often a single instruction (AVX-512 BF16).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.model.ops.cpu.kernel import I32, I64, device_function
from engine.model.ops.cpu.vector import BF16, F32P, HAS_BF16, LANES, VF32, VI32, constant, load16, splat, steps, store16

ROWS, COLUMNS = 8, 2 * LANES  # size of the largest tile
PACK_WORDS = 8  # words of each vector that `pack_columns` takes at a time
CONTRACT = ("contract",)  # never reassociated: a row's sums have one order in tiles of any number of rows
UNROLL = 4  # vectors in flight, to hide the latency of multiply-and-add
VI32_HALF = ir.VectorType(I32, PACK_WORDS)


def load_words(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, dtype: Any) -> ir.Value:
    address = builder.gep(builder.bitcast(pointer, I32.as_pointer()), [index])
    return builder.load(builder.bitcast(address, VI32.as_pointer()), align=dtype.bitwidth // 8)


def store_words(builder: ir.IRBuilder, words: ir.Value, pointer: ir.Value, index: ir.Value) -> None:
    address = builder.gep(builder.bitcast(pointer, I32.as_pointer()), [index])
    builder.store(words, builder.bitcast(address, VI32.as_pointer()), align=4)


def splat_word(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, dtype: Any) -> ir.Value:
    address = builder.gep(builder.bitcast(pointer, I32.as_pointer()), [index])
    return splat(builder, builder.load(address, align=dtype.bitwidth // 8))


def add_product(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value, dtype: Any) -> ir.Value:
    """Return total + a * b, for vectors of 16 words."""
    if dtype == types.uint16 and HAS_BF16:
        pairs = ir.VectorType(BF16, 2 * LANES)
        name, signature = "llvm.x86.avx512bf16.dpbf16ps.512", ir.FunctionType(VF32, [VF32, pairs, pairs])
        function = cgutils.get_or_insert_function(builder.module, signature, name)
        return builder.call(function, [total, builder.bitcast(a, pairs), builder.bitcast(b, pairs)])
    parts = [(a, b)]
    if dtype == types.uint16:
        half, high = ir.Constant(VI32, [16] * LANES), ir.Constant(VI32, [0xFFFF0000] * LANES)
        parts = [tuple(builder.shl(x, half) for x in (a, b)), tuple(builder.and_(x, high) for x in (a, b))]
    for x, y in parts:
        product = builder.fmul(builder.bitcast(x, VF32), builder.bitcast(y, VF32), flags=CONTRACT)
        total = builder.fadd(total, product, flags=CONTRACT)
    return total


def multiply_into(builder: ir.IRBuilder, totals: list[ir.Value], args: Sequence[ir.Value], dtype: Any) -> None:
    """Add the product of rows of a and 32 columns of b to totals, two vectors per row. args: a, words per row of a, b,
    words per row of b, number of words to sum over."""
    a, a_size, b, b_size, count = args
    rows, vectors = len(totals) // (COLUMNS // LANES), [ir.Constant(I64, i) for i in range(0, COLUMNS, LANES)]
    starts = [builder.mul(ir.Constant(I64, row), a_size) for row in range(rows)]
    with cgutils.for_range(builder, count, intp=I64) as loop:
        first = builder.mul(loop.index, b_size)
        some = [load_words(builder, b, builder.add(first, vector), dtype) for vector in vectors]
        for row, start in enumerate(starts):
            x = splat_word(builder, a, builder.add(start, loop.index), dtype)
            for y, total in zip(some, totals[row * len(some) :], strict=False):
                builder.store(add_product(builder, builder.load(total), x, y, dtype), total)


def offsets_of(builder: ir.IRBuilder, rows: int, size: ir.Value) -> list[ir.Value]:
    """Return the offset of each vector of a tile of `rows` rows and 32 columns. size: elements of a matrix's row."""
    starts = [builder.mul(ir.Constant(I64, row), size) for row in range(rows)]
    return [builder.add(start, ir.Constant(I64, i)) for start in starts for i in range(0, COLUMNS, LANES)]


def products_of(rows: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the intrinsics of `product_tile` and `add_product_tile` for tiles of `rows` rows and 32 columns."""

    @intrinsic
    def product(_: Any, out: Any, out_size: Any, a: Any, a_size: Any, b: Any, b_size: Any, count: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
            offsets = offsets_of(builder, rows, args[1])
            totals = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in offsets]
            multiply_into(builder, totals, args[2:], a.dtype)
            for offset, total in zip(offsets, totals, strict=True):
                store16(builder, builder.load(total), args[0], offset, types.float32)
            return context.get_dummy_value()

        size = types.int64
        return types.void(F32P, size, a, size, b, size, size), generate

    @intrinsic
    def adding(
        _: Any, out: Any, out_size: Any, shrink: Any, a: Any, a_size: Any, b: Any, b_size: Any, count: Any
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
            offsets, totals = offsets_of(builder, rows, args[1]), []
            for i, offset in enumerate(offsets):
                row = ir.Constant(I64, i * LANES // COLUMNS)
                factor = splat(builder, builder.load(builder.gep(args[2], [row])))
                before = load16(builder, args[0], offset, types.float32)
                kept = builder.fcmp_ordered("!=", factor, constant(0.0))
                start = builder.select(kept, builder.fmul(before, factor), constant(0.0))
                totals.append(cgutils.alloca_once_value(builder, start))
            multiply_into(builder, totals, args[3:], a.dtype)
            for offset, total in zip(offsets, totals, strict=True):
                store16(builder, builder.load(total), args[0], offset, types.float32)
            return context.get_dummy_value()

        size = types.int64
        return types.void(F32P, size, F32P, a, size, b, size, size), generate

    return product, adding


product_8, add_product_8 = products_of(8)
product_4, add_product_4 = products_of(4)
product_2, add_product_2 = products_of(2)
product_1, add_product_1 = products_of(1)


@device_function
def rows_at_once(left: int) -> int:
    """Return how many rows the next tile takes. left: rows that remain."""
    return 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1


@device_function
def product_tile(rows: Any, out: Any, out_size: Any, a: Any, a_size: Any, b: Any, b_size: Any, count: Any) -> None:
    """Compute out[r, c] = sum over i < count of a[r, i] * b[i, c], for 32 columns and `rows` rows (1, 2, 4 or 8).
    a_size, b_size, out_size: elements per row of each matrix; words in a and b, float32 in `out`."""
    if rows == 8:
        product_8(out, out_size, a, a_size, b, b_size, count)
    elif rows == 4:
        product_4(out, out_size, a, a_size, b, b_size, count)
    elif rows == 2:
        product_2(out, out_size, a, a_size, b, b_size, count)
    else:
        product_1(out, out_size, a, a_size, b, b_size, count)


@device_function
def add_product_tile(
    rows: Any, out: Any, out_size: Any, shrink: Any, a: Any, a_size: Any, b: Any, b_size: Any, count: Any
) -> None:
    """Compute out[r, c] = out[r, c] * shrink[r] + the result of `product_tile`. `out` need not be initialised in rows
    whose shrink[r] is 0."""
    if rows == 8:
        add_product_8(out, out_size, shrink, a, a_size, b, b_size, count)
    elif rows == 4:
        add_product_4(out, out_size, shrink, a, a_size, b, b_size, count)
    elif rows == 2:
        add_product_2(out, out_size, shrink, a, a_size, b, b_size, count)
    else:
        add_product_1(out, out_size, shrink, a, a_size, b, b_size, count)


def pointers(builder: ir.IRBuilder, table: ir.Value, first: ir.Value, offset: ir.Value, count: int) -> list[ir.Value]:
    """Return `count` pointers: the addresses in table[first : first + count], each plus `offset` bytes."""
    found = []
    for t in range(count):
        address = builder.load(builder.gep(table, [builder.add(first, ir.Constant(I64, t))]))
        found.append(builder.inttoptr(builder.add(address, offset), I32.as_pointer()))
    return found


def transposed(builder: ir.IRBuilder, vectors: list[ir.Value], word: ir.Value, dtype: Any) -> list[ir.Value]:
    """Transpose words [word, word + 8) of 16 vectors: return one vector per word, with that word of every vector."""
    parts = []
    for vector in vectors:
        address = builder.bitcast(builder.gep(vector, [word]), VI32_HALF.as_pointer())
        parts.append(builder.load(address, align=dtype.bitwidth // 8))
    # two squares of 8 by 8 words, side by side, transposed by exchanging ever larger parts
    lanes = ir.VectorType(I32, LANES)
    both = ir.Constant(lanes, list(range(LANES)))
    lines = [builder.shuffle_vector(parts[t], parts[t + PACK_WORDS], both) for t in range(PACK_WORDS)]
    for part in (1, 2, 4):
        upper = ir.Constant(lanes, [j if j & part == 0 else LANES + j - part for j in range(LANES)])
        lower = ir.Constant(lanes, [j + part if j & part == 0 else LANES + j for j in range(LANES)])
        for t in range(PACK_WORDS):
            if t & part == 0:
                a, b = lines[t], lines[t + part]
                lines[t], lines[t + part] = builder.shuffle_vector(a, b, upper), builder.shuffle_vector(a, b, lower)
    return lines


def joined(builder: ir.IRBuilder, rows: list[ir.Value], i: ir.Value, dtype: Any) -> ir.Value:
    """Return 16 words from elements [i, i + 16) of one row of float32, or of two rows of bfloat16."""
    element = ir.IntType(dtype.bitwidth)
    vector = ir.VectorType(element, LANES)
    parts = []
    for row in rows:
        address = builder.gep(builder.bitcast(row, element.as_pointer()), [i])
        parts.append(builder.load(builder.bitcast(address, vector.as_pointer()), align=dtype.bitwidth // 8))
    if len(parts) == 1:
        return parts[0]
    low, high = (builder.zext(part, VI32) for part in parts)
    return builder.or_(low, builder.shl(high, ir.Constant(VI32, [16] * LANES)))


@intrinsic
def pack_columns(_: Any, out: Any, out_size: Any, vectors: Any, offset: Any, words: Any) -> Any:
    """Write out[i, t] = word i of vector t, for 16 vectors at the byte addresses `vectors` + `offset`. words: number of
    words of a vector, a multiple of 8. out_size: words per row of `out`."""
    dtype = out.dtype

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        target, size, table, start, number = args
        sources = pointers(builder, table, ir.Constant(I64, 0), start, LANES)
        step = ir.Constant(I64, PACK_WORDS)
        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), number, step, intp=I64) as (i, _count):
            for word, line in enumerate(transposed(builder, sources, i, dtype)):
                offset = builder.mul(builder.add(i, ir.Constant(I64, word)), size)
                store_words(builder, line, target, offset)
        return context.get_dummy_value()

    return types.void(out, types.int64, types.CPointer(types.int64), types.int64, types.int64), generate


@intrinsic
def pack_row(_: Any, out: Any, rows: Any, offset: Any, size: Any) -> Any:
    """Write a row of words from one row of float32, or from the two rows of bfloat16 that are summed over together, at
    the byte addresses `rows` + `offset`. size: elements per row, a multiple of 16."""
    dtype = out.dtype

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        target, table, start, number = args
        sources = pointers(builder, table, ir.Constant(I64, 0), start, 32 // dtype.bitwidth)
        with steps(builder, number) as (i, _count):
            store_words(builder, joined(builder, sources, i, dtype), target, i)
        return context.get_dummy_value()

    return types.void(out, types.CPointer(types.int64), types.int64, types.int64), generate


def product_in_place_of(rows: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the intrinsics of `multiply_columns` and `add_product_of_rows`, for so few rows that packing costs more
    than it saves. Sums have the same order as those of packed tiles."""

    @intrinsic
    def by_columns(_: Any, out: Any, out_size: Any, a: Any, vectors: Any, offset: Any, words: Any) -> Any:
        dtype = a.dtype

        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
            target, size, left, table, start, number = args
            sources = pointers(builder, table, ir.Constant(I64, 0), start, COLUMNS)
            parts = [sources[t : t + LANES] for t in range(0, COLUMNS, LANES)]  # each has separate sums
            totals = [[cgutils.alloca_once(builder, VF32) for _ in parts] for _ in range(rows)]
            for total in itertools.chain(*totals):
                builder.store(constant(0.0), total)
            step = ir.Constant(I64, PACK_WORDS)
            with cgutils.for_range_slice(builder, ir.Constant(I64, 0), number, step, intp=I64) as (i, _count):
                columns = zip(*(transposed(builder, part, i, dtype) for part in parts), strict=True)
                for word, lines in enumerate(columns):
                    for row in range(rows):
                        offset = builder.add(builder.mul(ir.Constant(I64, row), number), i)
                        x = splat_word(builder, left, builder.add(offset, ir.Constant(I64, word)), dtype)
                        for line, total in zip(lines, totals[row], strict=True):
                            builder.store(add_product(builder, builder.load(total), x, line, dtype), total)
            for row in range(rows):
                for part, total in enumerate(totals[row]):
                    offset = builder.add(builder.mul(ir.Constant(I64, row), size), ir.Constant(I64, LANES * part))
                    store16(builder, builder.load(total), target, offset, types.float32)
            return context.get_dummy_value()

        table = types.CPointer(types.int64)
        return types.void(F32P, types.int64, a, table, types.int64, types.int64), generate

    @intrinsic
    def by_rows(
        _: Any, out: Any, out_size: Any, shrink: Any, a: Any, a_size: Any, vectors: Any, offset: Any, size: Any,
        count: Any,
    ) -> Any:  # fmt: skip
        dtype = a.dtype

        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
            target, target_size, factors, left, left_size, table, start, width, number = args
            per_word = 32 // dtype.bitwidth
            totals = [cgutils.alloca_once(builder, VF32) for _ in range(rows * UNROLL)]

            def columns(i: ir.Value, vectors: int) -> None:
                columns_at = [builder.add(i, ir.Constant(I64, LANES * lane)) for lane in range(vectors)]
                offsets = []
                for row in range(rows):
                    factor = splat(builder, builder.load(builder.gep(factors, [ir.Constant(I64, row)])))
                    first = builder.mul(ir.Constant(I64, row), target_size)
                    for lane, column in enumerate(columns_at):
                        offsets.append(builder.add(first, column))
                        before = load16(builder, target, offsets[-1], types.float32)
                        builder.store(builder.fmul(before, factor), totals[row * vectors + lane])
                with cgutils.for_range(builder, number, intp=I64) as loop:
                    t = builder.mul(loop.index, ir.Constant(I64, per_word))
                    sources = pointers(builder, table, t, start, per_word)
                    some = [joined(builder, sources, column, dtype) for column in columns_at]
                    for row in range(rows):
                        offset = builder.add(builder.mul(ir.Constant(I64, row), left_size), loop.index)
                        x = splat_word(builder, left, offset, dtype)
                        for lane, y in enumerate(some):
                            total = totals[row * vectors + lane]
                            builder.store(add_product(builder, builder.load(total), x, y, dtype), total)
                for offset, total in zip(offsets, totals, strict=False):
                    store16(builder, builder.load(total), target, offset, types.float32)

            wide = ir.Constant(I64, LANES * UNROLL)
            whole = builder.mul(builder.sdiv(width, wide), wide)
            with cgutils.for_range_slice(builder, ir.Constant(I64, 0), whole, wide, intp=I64) as (i, _count):
                columns(i, UNROLL)
            with cgutils.for_range_slice(builder, whole, width, ir.Constant(I64, LANES), intp=I64) as (i, _count):
                columns(i, 1)
            return context.get_dummy_value()

        size, table = types.int64, types.CPointer(types.int64)
        return types.void(F32P, size, F32P, a, size, table, size, size, size), generate

    return by_columns, by_rows


by_columns_1, by_rows_1 = product_in_place_of(1)
by_columns_2, by_rows_2 = product_in_place_of(2)
by_columns_4, by_rows_4 = product_in_place_of(4)


@device_function
def multiply_columns(rows: int, out: Any, out_size: int, a: Any, vectors: Any, offset: int, words: int) -> None:
    """Compute out[r, t] = sum over i < words of a[r, i] * word i of vector t, for up to 4 rows and 32 vectors."""
    if rows == 4:
        by_columns_4(out, out_size, a, vectors, offset, words)
    elif rows == 2:
        by_columns_2(out, out_size, a, vectors, offset, words)
    else:
        by_columns_1(out, out_size, a, vectors, offset, words)


@device_function
def add_product_of_rows(
    rows: int, out: Any, out_size: int, shrink: Any, a: Any, a_size: int, vectors: Any, offset: int, size: int,
    count: int,
) -> None:  # fmt: skip
    """Compute out[r, c] = out[r, c] * shrink[r] + sum over i < count of a[r, i] * word (i, c), for up to 4 rows and c <
    size. Words are made as in `pack_row`, from rows at the byte addresses `vectors` + `offset`."""
    if rows == 4:
        by_rows_4(out, out_size, shrink, a, a_size, vectors, offset, size, count)
    elif rows == 2:
        by_rows_2(out, out_size, shrink, a, a_size, vectors, offset, size, count)
    else:
        by_rows_1(out, out_size, shrink, a, a_size, vectors, offset, size, count)
