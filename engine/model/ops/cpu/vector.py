"""Inner loops that must use vectors of 16 float32, in LLVM IR because no auto-vectoriser can be trusted with them. On
CPUs with shorter vectors LLVM splits them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.model.ops.cpu.kernel import I32, I64


class BFloat16Type(ir.Type):
    """LLVM's bfloat, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16Type)

    def __hash__(self) -> int:
        return hash(BFloat16Type)


LANES = 16
UNROLL = 4  # vectors in flight, to hide the latency of multiply-and-add
ROWS, COLUMNS = 8, 2 * LANES  # of a tile of a matrix product, whose sums stay in registers
CACHE_LINE_BYTES = 64
F32 = ir.FloatType()
BF16 = BFloat16Type()
VF32 = ir.VectorType(F32, LANES)
VI32 = ir.VectorType(I32, LANES)
VI16 = ir.VectorType(ir.IntType(16), LANES)
FAST = ("fast",)
F32P = types.CPointer(types.float32)


def splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    first = builder.insert_element(ir.Constant(VF32, ir.Undefined), value, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(VF32, ir.Undefined), mask)


def constant(value: float) -> ir.Constant:
    return ir.Constant(VF32, [value] * LANES)


def load16(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, dtype: Any) -> ir.Value:
    """Elements [index, index + 16) as float32, from a bfloat16 (uint16 to Numba) or float32 array."""
    address = builder.gep(pointer, [index])
    if dtype == types.float32:
        return builder.load(builder.bitcast(address, VF32.as_pointer()), align=4)
    raw = builder.load(builder.bitcast(address, VI16.as_pointer()), align=2)
    shifted = builder.shl(builder.zext(raw, VI32), ir.Constant(VI32, [16] * LANES))
    return builder.bitcast(shifted, VF32)


def store16(builder: ir.IRBuilder, value: ir.Value, pointer: ir.Value, index: ir.Value) -> None:
    address = builder.bitcast(builder.gep(pointer, [index]), VF32.as_pointer())
    builder.store(value, address, align=4)


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return builder.fadd(builder.fmul(a, b, flags=FAST), c, flags=FAST)


def reduce_add(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(F32, [F32, VF32]), f"llvm.vector.reduce.fadd.v{LANES}f32"
    )
    return builder.call(function, [ir.Constant(F32, 0.0), value], fastmath=FAST)


def steps(builder: ir.IRBuilder, count: ir.Value) -> Any:
    """Loop over 0, 16, 32, … below `count`, which is a multiple of 16."""
    return cgutils.for_range_slice(builder, ir.Constant(I64, 0), count, ir.Constant(I64, LANES), intp=I64)


@intrinsic
def dot_rows(_: Any, out: Any, a: Any, rows: Any, start: Any, count: Any, size: Any) -> Any:
    """out[t] = sum over i of a[i] * rows[start + t * size + i], for t below `count`; `size` a multiple of 16.

    Rows are taken four at a time, for four independent sums; `out` needs space for `count` rounded up to that.
    """

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        target, left, right, first, number, width = args
        last = builder.sub(number, ir.Constant(I64, 1))
        totals = [cgutils.alloca_once(builder, VF32) for _ in range(UNROLL)]
        four = ir.Constant(I64, UNROLL)
        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), number, four, intp=I64) as (t, _count):
            offsets = []
            for lane, total in enumerate(totals):
                builder.store(constant(0.0), total)
                row = builder.add(t, ir.Constant(I64, lane))
                row = builder.select(builder.icmp_signed("<", row, last), row, last)  # the last row once more
                offsets.append(builder.add(first, builder.mul(row, width)))
            with steps(builder, width) as (i, _count):
                x = load16(builder, left, i, types.float32)
                for offset, total in zip(offsets, totals, strict=True):
                    y = load16(builder, right, builder.add(offset, i), sig.args[2].dtype)
                    builder.store(fma(builder, x, y, builder.load(total)), total)
            for lane, total in enumerate(totals):
                address = builder.gep(target, [builder.add(t, ir.Constant(I64, lane))])
                builder.store(reduce_add(builder, builder.load(total)), address)
        return context.get_dummy_value()

    return types.void(F32P, F32P, rows, types.int64, types.int64, types.int64), generate


@intrinsic
def add_weighted(_: Any, out: Any, weights: Any, count: Any, rows: Any, start: Any, size: Any, shrink: Any) -> Any:
    """out[i] = out[i] * shrink + sum over t of weights[t] * rows[start + t * size + i]; `size` a multiple of 16.

    Four vectors at a time, to have four independent sums, then those that are left.
    """

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        target, scale, number, source, first, width, factor = args
        totals = [cgutils.alloca_once(builder, VF32) for _ in range(UNROLL)]
        factors = splat(builder, factor)

        def columns(i: ir.Value, vectors: int) -> None:
            offsets = [builder.add(i, ir.Constant(I64, LANES * lane)) for lane in range(vectors)]
            for offset, total in zip(offsets, totals, strict=False):
                builder.store(builder.fmul(load16(builder, target, offset, types.float32), factors, flags=FAST), total)
            with cgutils.for_range(builder, number, intp=I64) as loop:
                row = builder.add(first, builder.mul(loop.index, width))
                weight = splat(builder, builder.load(builder.gep(scale, [loop.index])))
                for offset, total in zip(offsets, totals, strict=False):
                    value = load16(builder, source, builder.add(row, offset), sig.args[3].dtype)
                    builder.store(fma(builder, weight, value, builder.load(total)), total)
            for offset, total in zip(offsets, totals, strict=False):
                store16(builder, builder.load(total), target, offset)

        wide = ir.Constant(I64, LANES * UNROLL)
        whole = builder.mul(builder.sdiv(width, wide), wide)
        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), whole, wide, intp=I64) as (i, _count):
            columns(i, UNROLL)
        with cgutils.for_range_slice(builder, whole, width, ir.Constant(I64, LANES), intp=I64) as (i, _count):
            columns(i, 1)
        return context.get_dummy_value()

    return types.void(F32P, F32P, types.int64, rows, types.int64, types.int64, types.float32), generate


@intrinsic
def multiply_tile(_: Any, out: Any, out_size: Any, a: Any, a_size: Any, b: Any, b_size: Any, n: Any, add: Any) -> Any:
    """out[r, c] = sum over i < n of a[r, i] * b[i, c], added to what is there with `add`, for 8 rows and 32 columns; a
    row of each matrix has its `size`."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        target, target_size, left, left_size, right, right_size, count, keep = args
        vectors = [ir.Constant(I64, LANES * i) for i in range(COLUMNS // LANES)]
        places = [
            builder.add(builder.mul(ir.Constant(I64, row), target_size), vector)
            for row in range(ROWS) for vector in vectors
        ]  # fmt: skip
        totals = []
        for place in places:
            before = builder.select(keep, load16(builder, target, place, types.float32), constant(0.0))
            totals.append(cgutils.alloca_once_value(builder, before))
        with cgutils.for_range(builder, count, intp=I64) as loop:
            first = builder.mul(loop.index, right_size)
            some = [load16(builder, right, builder.add(first, vector), types.float32) for vector in vectors]
            for row in range(ROWS):
                index = builder.add(builder.mul(ir.Constant(I64, row), left_size), loop.index)
                x = splat(builder, builder.load(builder.gep(left, [index])))
                for y, total in zip(some, totals[row * len(some) :], strict=False):
                    builder.store(fma(builder, x, y, builder.load(total)), total)
        for place, total in zip(places, totals, strict=True):
            store16(builder, builder.load(total), target, place)
        return context.get_dummy_value()

    size = types.int64
    return types.void(F32P, size, F32P, size, F32P, size, size, types.boolean), generate


@intrinsic
def highest(_: Any, values: Any, count: Any) -> Any:
    """The largest of values[:count]; `count` a multiple of 16."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        pointer, number = args
        top = cgutils.alloca_once_value(builder, load16(builder, pointer, ir.Constant(I64, 0), types.float32))
        with steps(builder, number) as (i, _count):
            x, best = load16(builder, pointer, i, types.float32), builder.load(top)
            builder.store(builder.select(builder.fcmp_ordered(">", x, best), x, best), top)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(F32, [VF32]), f"llvm.vector.reduce.fmax.v{LANES}f32"
        )
        return builder.call(function, [builder.load(top)], fastmath=FAST)

    return types.float32(F32P, types.int64), generate


@intrinsic
def exp_of_difference(_: Any, values: Any, count: Any, top: Any) -> Any:
    """values[i] = e ** (values[i] - top) in place, for values not above `top`; returns their sum. `count` a multiple
    of 16. Accurate to 2e-7 relative: 2 ** x split into whole part and polynomial (Cephes' exp2f)."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        pointer, number, highest = args
        floor = cgutils.get_or_insert_function(builder.module, ir.FunctionType(VF32, [VF32]), f"llvm.floor.v{LANES}f32")
        total = cgutils.alloca_once_value(builder, constant(0.0))
        with steps(builder, number) as (i, _count):
            x = builder.fsub(load16(builder, pointer, i, types.float32), splat(builder, highest))
            x = builder.fmul(x, constant(1.4426950408889634))
            low = constant(-126.0)
            x = builder.select(builder.fcmp_ordered(">", x, low), x, low)
            whole = builder.call(floor, [builder.fadd(x, constant(0.5))])
            f = builder.fsub(x, whole)
            p = constant(1.535336188319500e-4)
            for coefficient in (
                1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2,
                2.402264791363012e-1, 6.931472028550421e-1, 1.0,
            ):  # fmt: skip
                p = fma(builder, p, f, constant(coefficient))
            exponent = builder.add(builder.fptosi(whole, VI32), ir.Constant(VI32, [127] * LANES))
            power = builder.bitcast(builder.shl(exponent, ir.Constant(VI32, [23] * LANES)), VF32)
            result = builder.fmul(p, power)
            store16(builder, result, pointer, i)
            builder.store(builder.fadd(builder.load(total), result, flags=FAST), total)
        return reduce_add(builder, builder.load(total))

    return types.float32(F32P, types.int64, types.float32), generate


@intrinsic
def prefetch(_: Any, pointer: Any, index: Any, size: Any) -> Any:
    """Ask for elements [index, index + size) to be brought into the cache."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        array, start, count = args
        byte = ir.IntType(8).as_pointer()
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32]), "llvm.prefetch.p0"
        )
        line = CACHE_LINE_BYTES * 8 // sig.args[0].dtype.bitwidth
        read, keep, data = ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)
        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), count, ir.Constant(I64, line), intp=I64) as (i, _n):
            address = builder.bitcast(builder.gep(array, [builder.add(start, i)]), byte)
            builder.call(function, [address, read, keep, data])
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.int64), generate
