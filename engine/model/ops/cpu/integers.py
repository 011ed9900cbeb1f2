"""Inner loops over weights of eight and four bits, in LLVM IR like those of vector.py."""

from __future__ import annotations

import itertools
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.model.ops.cpu.kernel import I32, I64
from engine.model.ops.cpu.vector import F32, F32P, LANES, VF32, VI32, constant, load16, prefetch_line, splat, store16

VECTORS = 4  # of 16 outputs, whose weights lie side by side: a panel
PANEL = VECTORS * LANES
AHEAD = 4096  # bytes of a weight that are asked for early: no hardware prefetcher looks past the end of a page
QUAD = 4  # inputs of one output that lie side by side: an instruction multiplies and adds them
I8, I16 = ir.IntType(8), ir.IntType(16)
U8P, I8P, I32P = (types.CPointer(kind) for kind in (types.uint8, types.int8, types.int32))


def add_quads_vnni(builder: ir.IRBuilder, total: ir.Value, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """total + the sums of products of four bytes, all as 16 int32."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(VI32, [VI32, VI32, VI32]), "llvm.x86.avx512.vpdpbusd.512"
    )
    return builder.call(function, [total, unsigned, signed])


def add_quads_plain(builder: ir.IRBuilder, total: ir.Value, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """The same on any CPU. A product fits 16 bits if the signed byte is not -128."""
    bytes, words = (ir.VectorType(kind, QUAD * LANES) for kind in (I8, I16))
    a, b = builder.zext(builder.bitcast(unsigned, bytes), words), builder.sext(builder.bitcast(signed, bytes), words)
    products = builder.mul(a, b)
    for i in range(QUAD):
        mask = ir.Constant(ir.VectorType(I32, LANES), [QUAD * lane + i for lane in range(LANES)])
        part = builder.shuffle_vector(products, ir.Constant(words, ir.Undefined), mask)
        total = builder.add(total, builder.sext(part, VI32))
    return total


has_vnni = binding.get_host_cpu_features().get("avx512vnni", False)
add_quads = add_quads_vnni if has_vnni else add_quads_plain


def load_vector(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, kind: ir.VectorType) -> ir.Value:
    return builder.load(builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer()), align=1)


def multiply_panel(bits: int, rows: int) -> Any:
    """The product of `rows` rows of inputs in int8 with a panel of weights of 8 or 4 `bits`: code for both numbers."""

    @intrinsic
    def multiply(
        _: Any, out: Any, x: Any, x_scale: Any, x_sum: Any, last: Any, panel: Any, scale: Any, zero: Any, n: Any,
        size: Any,
    ) -> Any:  # fmt: skip
        """out[r, o] = the product of row min(r, last) of x with output o of the panel; n groups of `size` inputs.

        x: int8 [rows, n * size]; x_scale float32 and x_sum int32: [rows, n], of each group; panel: values less than
        2 ** bits, half of which is added, [inputs / (4 * quads), 64, 4 * quads]; scale and zero: float32 [n, 64].
        """

        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
            target, inputs, factors, sums, last_row, weights, scales, zeros, groups, group_size = args
            width = builder.mul(groups, group_size)
            chosen = []
            for r in range(rows):
                row = ir.Constant(I64, r)
                chosen.append(builder.select(builder.icmp_signed("<", row, last_row), row, last_row))
            totals = [[cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(VECTORS)] for _ in chosen]
            dots = [[cgutils.alloca_once(builder, VI32) for _ in range(VECTORS)] for _ in chosen]
            quads = 8 // bits  # of inputs in a word
            step = ir.Constant(I64, quads * QUAD)
            middle = ir.Constant(VI32, [1 << bits - 1] * LANES)
            with cgutils.for_range(builder, groups, intp=I64) as group:
                for dot in itertools.chain(*dots):
                    builder.store(ir.Constant(VI32, [0] * LANES), dot)
                first = builder.mul(group.index, group_size)
                with cgutils.for_range_slice(builder, ir.Constant(I64, 0), group_size, step, intp=I64) as (i, _count):
                    column = builder.add(first, i)
                    start = builder.mul(column, ir.Constant(I64, PANEL * bits // 8))
                    offsets = [builder.add(start, ir.Constant(I64, v * QUAD * LANES)) for v in range(VECTORS)]
                    words = [load_vector(builder, weights, offset, VI32) for offset in offsets]
                    for offset in offsets:
                        prefetch_line(builder, builder.gep(weights, [builder.add(offset, ir.Constant(I64, AHEAD))]))
                    for quad in range(quads):
                        some = words if bits == 8 else [nibbles(builder, word, quad) for word in words]
                        for row, row_dots in zip(chosen, dots, strict=True):
                            offset = builder.add(builder.mul(row, width), column)
                            address = builder.gep(inputs, [builder.add(offset, ir.Constant(I64, quad * QUAD))])
                            four = builder.load(builder.bitcast(address, I32.as_pointer()), align=1)
                            four = splat(builder, four)
                            for word, dot in zip(some, row_dots, strict=True):
                                builder.store(add_quads(builder, builder.load(dot), word, four), dot)
                for v in range(VECTORS):
                    offset = builder.add(builder.mul(group.index, ir.Constant(I64, PANEL)), ir.Constant(I64, v * LANES))
                    own = load16(builder, scales, offset, types.float32)
                    shift = builder.fneg(load16(builder, zeros, offset, types.float32))
                    for row, row_dots, row_totals in zip(chosen, dots, totals, strict=True):
                        offset = builder.add(builder.mul(row, groups), group.index)
                        factor = builder.fmul(own, splat(builder, builder.load(builder.gep(factors, [offset]))))
                        sum = splat(builder, builder.load(builder.gep(sums, [offset])))
                        dot = builder.sub(builder.load(row_dots[v]), builder.mul(middle, sum))
                        dot = multiply_add(builder, shift, builder.sitofp(sum, VF32), builder.sitofp(dot, VF32))
                        total = builder.load(row_totals[v])
                        builder.store(multiply_add(builder, dot, factor, total), row_totals[v])
            for i, total in enumerate(itertools.chain(*totals)):
                store16(builder, builder.load(total), target, ir.Constant(I64, i * LANES), types.float32)
            return context.get_dummy_value()

        size_type = types.int64
        return types.void(F32P, I8P, F32P, I32P, size_type, U8P, F32P, F32P, size_type, size_type), generate

    return multiply


def nibbles(builder: ir.IRBuilder, word: ir.Value, index: int) -> ir.Value:
    """The low (0) or high (1) nibble of each byte."""
    return builder.and_(
        builder.lshr(word, ir.Constant(VI32, [4 * index] * LANES)), ir.Constant(VI32, [0x0F0F0F0F] * LANES)
    )


def multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c, rounded once: the same in code for any number of rows."""
    kind = ir.FunctionType(VF32, [VF32, VF32, VF32])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), [a, b, c])


@intrinsic
def magnitude(_: Any, value: Any) -> Any:
    """The bits of a float32 without its sign: integers in the order of absolute values, with infinity and NaN last."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.and_(builder.bitcast(args[0], I32), ir.Constant(I32, 0x7FFFFFFF))

    return types.int32(types.float32), generate


@intrinsic
def from_bits(_: Any, bits: Any) -> Any:
    return types.float32(types.int32), lambda context, builder, sig, a: builder.bitcast(a[0], F32)


@intrinsic
def nearest(_: Any, value: Any) -> Any:
    """A float32 rounded to the nearest integer, of two the even one, as int32."""

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
