"""Inner loops that must use vectors of 16 float32, in LLVM IR because no auto-vectoriser can be trusted with them. On
CPUs with shorter vectors LLVM splits them."""

from __future__ import annotations

from typing import Any

import torch
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


HAS_BF16 = torch.cpu._is_avx512_bf16_supported()
LANES = 16
CACHE_LINE_BYTES = 64
F32 = ir.FloatType()
BF16 = BFloat16Type()
VF32 = ir.VectorType(F32, LANES)
VI32 = ir.VectorType(I32, LANES)
VI16 = ir.VectorType(ir.IntType(16), LANES)
FAST = ("fast",)
F32P = types.CPointer(types.float32)


def splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    vector = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)


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


def store16(builder: ir.IRBuilder, value: ir.Value, pointer: ir.Value, index: ir.Value, dtype: Any) -> None:
    """Write 16 float32 values, rounded to nearest even for bfloat16."""
    if dtype == types.uint16 and HAS_BF16:
        value = builder.fptrunc(value, ir.VectorType(BF16, LANES))
    elif dtype == types.uint16:  # LLVM would call a function, for each value, that is nowhere
        bits, half = builder.bitcast(value, VI32), ir.Constant(VI32, [16] * LANES)
        odd = builder.and_(builder.lshr(bits, half), ir.Constant(VI32, [1] * LANES))
        bits = builder.add(builder.add(bits, ir.Constant(VI32, [0x7FFF] * LANES)), odd)
        value = builder.trunc(builder.lshr(bits, half), VI16)
    address = builder.bitcast(builder.gep(pointer, [index]), value.type.as_pointer())
    builder.store(value, address, align=dtype.bitwidth // 8)


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return builder.fadd(builder.fmul(a, b, flags=FAST), c, flags=FAST)


def steps(builder: ir.IRBuilder, count: ir.Value) -> Any:
    """Loop over 0, 16, 32, … below `count`, which is a multiple of 16."""
    return cgutils.for_range_slice(builder, ir.Constant(I64, 0), count, ir.Constant(I64, LANES), intp=I64)


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
def exponentials(_: Any, out: Any, scores: Any, count: Any, factor: Any, top: Any, sums: Any, shrink: Any) -> Any:
    """out[i] = 2 ** (scores[i] * factor - top), for scores whose power is not above 0; `count` a multiple of 16.

    The 16 elements of `sums` are multiplied by `shrink`, and element i added to lane i % 16. Powers below -126 give 0,
    so that what is hidden changes no bit of a sum. Otherwise accurate to 2e-7 relative: whole part and polynomial
    (Cephes' exp2f).
    """

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        target, pointer, number, scale, highest, lanes, less = args
        floor = cgutils.get_or_insert_function(builder.module, ir.FunctionType(VF32, [VF32]), f"llvm.floor.v{LANES}f32")
        zero, low = ir.Constant(I64, 0), constant(-126.0)
        before = load16(builder, lanes, zero, types.float32)
        total = cgutils.alloca_once_value(builder, builder.fmul(before, splat(builder, less)))
        with steps(builder, number) as (i, _count):
            score = load16(builder, pointer, i, types.float32)
            power = builder.fsub(
                builder.fmul(score, splat(builder, scale), flags=FAST), splat(builder, highest), flags=FAST
            )
            seen = builder.fcmp_ordered(">", power, low)
            x = builder.select(seen, power, low)
            whole = builder.call(floor, [builder.fadd(x, constant(0.5))])
            f = builder.fsub(x, whole)
            p = constant(1.535336188319500e-4)
            for coefficient in (
                1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2,
                2.402264791363012e-1, 6.931472028550421e-1, 1.0,
            ):  # fmt: skip
                p = fma(builder, p, f, constant(coefficient))
            exponent = builder.shl(builder.fptosi(whole, VI32), ir.Constant(VI32, [23] * LANES))
            raised = builder.bitcast(builder.add(builder.bitcast(p, VI32), exponent), VF32)
            result = builder.select(seen, raised, constant(0.0))
            store16(builder, result, target, i, sig.args[0].dtype)
            builder.store(builder.fadd(builder.load(total), result), total)
        store16(builder, builder.load(total), lanes, zero, types.float32)
        return context.get_dummy_value()

    f32 = types.float32
    return types.void(out, F32P, types.int64, f32, f32, F32P, f32), generate


def prefetch_line(builder: ir.IRBuilder, address: ir.Value) -> None:
    byte = ir.IntType(8).as_pointer()
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32]), "llvm.prefetch.p0"
    )
    read, keep, data = ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)
    builder.call(function, [builder.bitcast(address, byte), read, keep, data])


@intrinsic
def prefetch(_: Any, table: Any, count: Any, offset: Any, size: Any) -> Any:
    """Ask for `size` bytes from each of the first `count` addresses in `table` + `offset` on to be brought into the
    cache."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        addresses, number, start, length = args
        line = ir.Constant(I64, CACHE_LINE_BYTES)
        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), length, line, intp=I64) as (i, _n):
            place = builder.add(start, i)
            with cgutils.for_range(builder, number, intp=I64) as loop:
                address = builder.add(builder.load(builder.gep(addresses, [loop.index])), place)
                prefetch_line(builder, builder.inttoptr(address, ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.CPointer(types.int64), types.int64, types.int64, types.int64), generate
