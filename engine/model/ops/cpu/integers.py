"""Inner loops over weights of eight and four bits, in LLVM IR like those in vector.py."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.model.ops.cpu.kernel import I32, I64
from engine.model.ops.cpu.vector import F32, F32P, LANES, VF32, VI32, constant, load16, prefetch_line, splat, store16

VECTORS = 4  # vectors of 16 outputs with adjacent weights, which form a panel
PANEL = VECTORS * LANES
AHEAD = 4096  # distance of prefetches, in bytes: hardware prefetchers do not look past the end of a page
QUAD = 4  # adjacent inputs of one output, which one instruction multiplies and adds
I8, I16 = ir.IntType(8), ir.IntType(16)
BYTES, WORDS = ir.VectorType(I8, 32), ir.VectorType(I16, 16)  # the contents of an AVX2 register
PAIRED = 32  # inputs whose products with 4-bit weights can be added up in 16 bits, two by two: 15 * 127 * 32 / 2
U8P, I8P, I32P = (types.CPointer(kind) for kind in (types.uint8, types.int8, types.int32))


def add_quads_vnni(builder: ir.IRBuilder, total: ir.Value, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """Return total + the sums of products of four bytes each, with VNNI. All vectors are 16 int32."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(VI32, [VI32, VI32, VI32]), "llvm.x86.avx512.vpdpbusd.512"
    )
    return builder.call(function, [total, unsigned, signed])


def add_quads_plain(
    builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value, *, signed: bool = False
) -> ir.Value:
    """Return total + the sums of products of four bytes each, on any CPU. Bytes of b must not be -128, so that products
    fit 16 bits. signed: whether bytes of a are signed."""
    bytes, words = (ir.VectorType(kind, QUAD * LANES) for kind in (I8, I16))
    extend = builder.sext if signed else builder.zext
    products = builder.mul(extend(builder.bitcast(a, bytes), words), builder.sext(builder.bitcast(b, bytes), words))
    for i in range(QUAD):
        mask = ir.Constant(ir.VectorType(I32, LANES), [QUAD * lane + i for lane in range(LANES)])
        part = builder.shuffle_vector(products, ir.Constant(words, ir.Undefined), mask)
        total = builder.add(total, builder.sext(part, VI32))
    return total


def add_quads_avx2(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """Return total + the sums of products of four signed bytes each, with AVX2. It multiplies unsigned bytes by signed
    ones, so signs of a are moved to b, whose bytes must not be -128."""
    parts = []
    for first, second in zip(halves(builder, a), halves(builder, b), strict=True):
        size = call(builder, "llvm.abs.v32i8", BYTES, first, ir.Constant(ir.IntType(1), 0))
        parts.append(pair_sums(builder, size, call(builder, "llvm.x86.avx2.psign.b", BYTES, second, first)))
    return builder.add(total, quad_sums(builder, parts))


def halves(builder: ir.IRBuilder, vector: ir.Value) -> list[ir.Value]:
    """Return the two halves of 16 int32, each as the 32 bytes of an AVX2 register."""
    undefined, some = ir.Constant(VI32, ir.Undefined), LANES // 2
    masks = [ir.Constant(ir.VectorType(I32, some), list(range(start, start + some))) for start in (0, some)]
    return [builder.bitcast(builder.shuffle_vector(vector, undefined, mask), BYTES) for mask in masks]


def pair_sums(builder: ir.IRBuilder, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """Return the sums of products of two bytes each. The sums must fit 16 bits."""
    return call(builder, "llvm.x86.avx2.pmadd.ub.sw", WORDS, unsigned, signed)


def quad_sums(builder: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
    """Add up adjacent pairs of 16-bit sums, in both halves. Return 16 int32."""
    ones = ir.Constant(WORDS, [1] * WORDS.count)
    low, high = (call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, LANES // 2), part, ones) for part in parts)
    return builder.shuffle_vector(low, high, ir.Constant(VI32, list(range(LANES))))


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


FEATURES = binding.get_host_cpu_features()
has_vnni = FEATURES.get("avx512vnni", False)
has_avx2 = FEATURES.get("avx2", False) and not has_vnni
MIDDLE = 128 if has_vnni else 0
"""Added to weights of eight bits, since VNNI multiplies unsigned ones. Weights of four bits are always unsigned."""
add_quads = {
    4: add_quads_vnni if has_vnni else add_quads_plain,
    8: add_quads_vnni if has_vnni else add_quads_avx2 if has_avx2 else partial(add_quads_plain, signed=True),
}


def load_vector(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, kind: ir.VectorType) -> ir.Value:
    return builder.load(builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer()), align=1)


def multiply_panel(bits: int, rows: int) -> Any:
    """Return an intrinsic that multiplies `rows` rows of int8 inputs with a panel of weights of 8 or 4 `bits`."""
    step_vectors = 1 if has_avx2 and rows > 1 else VECTORS  # as many as have their sums in registers

    @intrinsic
    def multiply(
        _: Any, out: Any, x: Any, x_scale: Any, x_sum: Any, last: Any, panel: Any, scale: Any, zero: Any, n: Any,
        size: Any,
    ) -> Any:  # fmt: skip
        """Compute out[r, o]: row min(r, last) of x times output o of the panel, over n groups of `size` inputs.

        x: [rows, n * size] int8. x_scale, x_sum: [rows, n] float32 and int32, scale and sum of each group.
        panel: [inputs / (4 * quads), 64, 4 * quads], values plus 8 (4 bits) or plus MIDDLE (8 bits).
        scale, zero: [n, 64] float32; zero: zero points, plus 8 for 4 bits; a null pointer if there are none.
        """

        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
            target, inputs, factors, sums, last_row, weights, scales, zeros, groups, group_size = args
            width = builder.mul(groups, group_size)
            chosen = []
            for r in range(rows):
                row = ir.Constant(I64, r)
                chosen.append(builder.select(builder.icmp_signed("<", row, last_row), row, last_row))
            totals = [[cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(VECTORS)] for _ in chosen]
            has_zeros = builder.icmp_signed("!=", builder.ptrtoint(zeros, I64), ir.Constant(I64, 0))
            middle = ir.Constant(VI32, [MIDDLE] * LANES)
            with cgutils.for_range(builder, groups, intp=I64) as group:
                first = builder.mul(group.index, group_size)
                places = [builder.add(builder.mul(row, groups), group.index) for row in chosen]
                rows_x = [builder.gep(inputs, [builder.add(builder.mul(row, width), first)]) for row in chosen]
                panel_group = builder.gep(weights, [builder.mul(first, ir.Constant(I64, PANEL * bits // 8))])
                for start in range(0, VECTORS, step_vectors):
                    vectors = range(start, start + step_vectors)
                    dots = add_up(builder, bits, rows_x, panel_group, vectors, group_size)
                    for i, v in enumerate(vectors):
                        offset = builder.add(
                            builder.mul(group.index, ir.Constant(I64, PANEL)), ir.Constant(I64, v * LANES)
                        )
                        own = load16(builder, scales, offset, types.float32)
                        for place, row_dots, row_totals in zip(places, dots, totals, strict=True):
                            factor = builder.fmul(own, splat(builder, builder.load(builder.gep(factors, [place]))))
                            sum, dot = builder.load(builder.gep(sums, [place])), builder.load(row_dots[i])
                            if bits == 8 and MIDDLE:
                                dot = builder.sub(dot, builder.mul(middle, splat(builder, sum)))
                            product = cgutils.alloca_once(builder, VF32)
                            builder.store(builder.sitofp(dot, VF32), product)
                            with builder.if_then(has_zeros, likely=bits == 4):
                                shift = builder.fneg(load16(builder, zeros, offset, types.float32))
                                sum = splat(builder, builder.sitofp(sum, F32))
                                builder.store(multiply_add(builder, shift, sum, builder.load(product)), product)
                            total = builder.load(row_totals[v])
                            builder.store(multiply_add(builder, builder.load(product), factor, total), row_totals[v])
            for i, total in enumerate(itertools.chain(*totals)):
                store16(builder, builder.load(total), target, ir.Constant(I64, i * LANES), types.float32)
            return context.get_dummy_value()

        size_type = types.int64
        return types.void(F32P, I8P, F32P, I32P, size_type, U8P, F32P, F32P, size_type, size_type), generate

    return multiply


def add_up(
    builder: ir.IRBuilder, bits: int, rows: list[ir.Value], panel: ir.Value, vectors: range, size: ir.Value
) -> list[list[ir.Value]]:
    """Generate code for sums over a group of inputs: 16 int32 per row and vector, in memory that becomes registers."""
    quads = 8 // bits  # quads of inputs in a word
    dots = [[cgutils.alloca_once(builder, VI32) for _ in vectors] for _ in rows]
    for dot in itertools.chain(*dots):
        builder.store(ir.Constant(VI32, [0] * LANES), dot)

    def number(value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    def words_at(column: ir.Value) -> list[ir.Value]:
        start = builder.mul(column, number(PANEL * bits // 8))
        offsets = [builder.add(start, number(v * QUAD * LANES)) for v in vectors]
        words = [load_vector(builder, panel, offset, VI32) for offset in offsets]
        for offset in offsets:
            prefetch_line(builder, builder.gep(panel, [builder.add(offset, number(AHEAD))]))
        return words

    def four_at(row: ir.Value, column: ir.Value) -> ir.Value:
        return splat(builder, builder.load(builder.bitcast(builder.gep(row, [column]), I32.as_pointer()), align=1))

    if bits == 4 and has_avx2:  # fewer instructions than add_quads_avx2 takes, since small products fit 16 bits
        sums = [[[cgutils.alloca_once(builder, WORDS) for _ in range(2)] for _ in vectors] for _ in rows]
        with cgutils.for_range_slice(builder, number(0), size, number(PAIRED), intp=I64) as (start, _count):
            for half in itertools.chain(*itertools.chain(*sums)):
                builder.store(ir.Constant(WORDS, [0] * WORDS.count), half)
            end = builder.add(start, number(PAIRED))
            end = builder.select(builder.icmp_signed("<", end, size), end, size)
            with cgutils.for_range_slice(builder, start, end, number(2 * QUAD), intp=I64) as (column, _inner):
                words = words_at(column)
                for quad in range(2):
                    some = [halves(builder, nibbles(builder, word, quad)) for word in words]
                    for row, row_sums in zip(rows, sums, strict=True):
                        four, _ = halves(builder, four_at(row, builder.add(column, number(quad * QUAD))))
                        for word, pair in zip(some, row_sums, strict=True):
                            for part, total in zip(word, pair, strict=True):
                                builder.store(builder.add(builder.load(total), pair_sums(builder, part, four)), total)
            for pair, dot in zip(itertools.chain(*sums), itertools.chain(*dots), strict=True):
                products = quad_sums(builder, [builder.load(half) for half in pair])
                builder.store(builder.add(builder.load(dot), products), dot)
        return dots
    with cgutils.for_range_slice(builder, number(0), size, number(quads * QUAD), intp=I64) as (column, _count):
        words = words_at(column)
        for quad in range(quads):
            some = words if bits == 8 else [nibbles(builder, word, quad) for word in words]
            for row, row_dots in zip(rows, dots, strict=True):
                four = four_at(row, builder.add(column, number(quad * QUAD)))
                for word, dot in zip(some, row_dots, strict=True):
                    builder.store(add_quads[bits](builder, builder.load(dot), word, four), dot)
    return dots


def nibbles(builder: ir.IRBuilder, word: ir.Value, index: int) -> ir.Value:
    """Return the low (index 0) or high (index 1) nibble of each byte."""
    return builder.and_(
        builder.lshr(word, ir.Constant(VI32, [4 * index] * LANES)), ir.Constant(VI32, [0x0F0F0F0F] * LANES)
    )


def multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Return a * b + c, rounded once, so that code for any number of rows gives the same bits."""
    kind = ir.FunctionType(VF32, [VF32, VF32, VF32])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), [a, b, c])


@intrinsic
def magnitude(_: Any, value: Any) -> Any:
    """Return the bits of a float32 without its sign. As integers they are ordered by absolute value, NaN last."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.and_(builder.bitcast(args[0], I32), ir.Constant(I32, 0x7FFFFFFF))

    return types.int32(types.float32), generate


@intrinsic
def from_bits(_: Any, bits: Any) -> Any:
    return types.float32(types.int32), lambda context, builder, sig, a: builder.bitcast(a[0], F32)


@intrinsic
def nearest(_: Any, value: Any) -> Any:
    """Round a float32 to the nearest int32, ties to even."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(F32, [F32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.rint.f32")
        return builder.fptosi(builder.call(function, args), I32)

    return types.int32(types.float32), generate


@intrinsic
def as_u8(_: Any, address: Any) -> Any:
    return U8P(types.int64), lambda context, builder, sig, a: builder.inttoptr(a[0], I8.as_pointer())


@intrinsic
def as_i8(_: Any, address: Any) -> Any:
    return I8P(types.int64), lambda context, builder, sig, a: builder.inttoptr(a[0], I8.as_pointer())
