"""Inner loops that must use vectors of 16 float32. They are in LLVM IR, since auto-vectorisers are not reliable. On
CPUs with shorter vectors LLVM splits them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.model.ops.cpu.kernel import I32, I64


class BFloat16Type(ir.Type):
    """LLVM's bfloat type, for which llvmlite has no class."""

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
LOG2_E = np.float32(1.4426950408889634)
F32P = types.CPointer(types.float32)
HAS_SCALEF = binding.get_host_cpu_features().get("avx512f", False)
POLYNOMIAL = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)  # of 2 ** x in [-0.5, 0.5], the highest power first: Cephes' exp2f


def splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    vector = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)


def constant(value: float) -> ir.Constant:
    return ir.Constant(VF32, [value] * LANES)


def load16(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, dtype: Any) -> ir.Value:
    """Load elements [index, index + 16) of a bfloat16 (uint16 to Numba) or float32 array as float32."""
    address = builder.gep(pointer, [index])
    if dtype == types.float32:
        return builder.load(builder.bitcast(address, VF32.as_pointer()), align=4)
    raw = builder.load(builder.bitcast(address, VI16.as_pointer()), align=2)
    shifted = builder.shl(builder.zext(raw, VI32), ir.Constant(VI32, [16] * LANES))
    return builder.bitcast(shifted, VF32)


def store16(builder: ir.IRBuilder, value: ir.Value, pointer: ir.Value, index: ir.Value, dtype: Any) -> None:
    """Store 16 float32 values, rounded to nearest even for bfloat16."""
    if dtype == types.uint16 and HAS_BF16:
        value = builder.fptrunc(value, ir.VectorType(BF16, LANES))
    elif dtype == types.uint16:  # for fptrunc LLVM would call a function per value that no library has
        bits, half = builder.bitcast(value, VI32), ir.Constant(VI32, [16] * LANES)
        odd = builder.and_(builder.lshr(bits, half), ir.Constant(VI32, [1] * LANES))
        bits = builder.add(builder.add(bits, ir.Constant(VI32, [0x7FFF] * LANES)), odd)
        value = builder.trunc(builder.lshr(bits, half), VI16)
    address = builder.bitcast(builder.gep(pointer, [index]), value.type.as_pointer())
    builder.store(value, address, align=dtype.bitwidth // 8)


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return builder.fadd(builder.fmul(a, b), c)


def steps(builder: ir.IRBuilder, count: ir.Value) -> Any:
    """Loop over 0, 16, 32, … below `count`, which is a multiple of 16."""
    return cgutils.for_range_slice(builder, ir.Constant(I64, 0), count, ir.Constant(I64, LANES), intp=I64)


def exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Return 2 ** x with a relative error of 2e-7, from the nearest integer and a polynomial for the rest. Without
    AVX-512, x must be at most 127, and the result is 0 at or below -126."""
    round = cgutils.get_or_insert_function(builder.module, ir.FunctionType(VF32, [VF32]), f"llvm.nearbyint.v{LANES}f32")
    low = constant(-126.0)
    seen = builder.fcmp_ordered(">", x, low)
    if not HAS_SCALEF:
        x = builder.select(seen, x, low)
    whole = builder.call(round, [x])
    f = builder.fsub(x, whole)
    p = constant(POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        p = fma(builder, p, f, constant(coefficient))
    if HAS_SCALEF:
        signature = ir.FunctionType(VF32, [VF32, VF32, VF32, ir.IntType(16), I32])
        scale = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512.mask.scalef.ps.512")
        return builder.call(scale, [p, whole, constant(0.0), ir.Constant(ir.IntType(16), -1), ir.Constant(I32, 4)])
    exponent = builder.shl(builder.fptosi(whole, VI32), ir.Constant(VI32, [23] * LANES))
    raised = builder.bitcast(builder.add(builder.bitcast(p, VI32), exponent), VF32)
    return builder.select(seen, raised, constant(0.0))


def reduced(builder: ir.IRBuilder, name: str, vector: ir.Value, *start: ir.Value) -> ir.Value:
    signature = ir.FunctionType(F32, [*(F32 for _ in start), VF32])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.vector.reduce.{name}.v{LANES}f32")
    return builder.call(function, [*start, vector], fastmath=FAST)


@intrinsic
def weigh(
    _: Any, out: Any, totals: Any, tops: Any, shrinks: Any, scores: Any, size: Any, rows: Any, count: Any, factor: Any
) -> Any:  # fmt: skip
    """Turn the first `count` scores of each row into softmax weights. Up to 16 rows of `size`; count: a multiple of 16.

    tops[r], a power of 2, is raised to the row's highest score * factor; shrinks[r] = 2 ** (its old value - the new
    one). out[r, i] = 2 ** (scores[r, i] * factor - tops[r]). The 16 elements of totals[r] are multiplied by shrinks[r],
    and weight i is added to element i % 16. A score of LOWEST (attention_tile.py) weighs 0 and changes no bit of a sum.
    """

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        target, lanes, highest, factors, source, width, number, length, scale = args
        f32, zero = types.float32, ir.Constant(I64, 0)
        with cgutils.for_range(builder, number, intp=I64) as row:
            first = builder.mul(row.index, width)
            best = cgutils.alloca_once_value(builder, load16(builder, source, first, f32))
            with steps(builder, length) as (i, _count):
                x, so_far = load16(builder, source, builder.add(first, i), f32), builder.load(best)
                builder.store(builder.select(builder.fcmp_ordered(">", x, so_far), x, so_far), best)
            address = builder.gep(highest, [row.index])
            before, now = builder.load(address), builder.fmul(reduced(builder, "fmax", builder.load(best)), scale)
            now = builder.select(builder.fcmp_ordered(">", now, before), now, before)
            builder.store(now, address)
            builder.store(builder.fsub(before, now), builder.gep(factors, [row.index]))
        store16(builder, exp2(builder, load16(builder, factors, zero, f32)), factors, zero, f32)
        with cgutils.for_range(builder, number, intp=I64) as row:
            first, own = builder.mul(row.index, width), builder.mul(row.index, ir.Constant(I64, LANES))
            top = splat(builder, builder.load(builder.gep(highest, [row.index])))
            less = splat(builder, builder.load(builder.gep(factors, [row.index])))
            total = cgutils.alloca_once_value(builder, builder.fmul(load16(builder, lanes, own, f32), less))
            with steps(builder, length) as (i, _count):
                offset = builder.add(first, i)
                score = builder.fmul(load16(builder, source, offset, f32), splat(builder, scale))
                weight = exp2(builder, builder.fsub(score, top))
                store16(builder, weight, target, offset, sig.args[0].dtype)
                builder.store(builder.fadd(builder.load(total), weight), total)
            store16(builder, builder.load(total), lanes, own, f32)
        return context.get_dummy_value()

    size_type = types.int64
    return types.void(out, F32P, F32P, F32P, F32P, size_type, size_type, size_type, types.float32), generate


@intrinsic
def copy(_: Any, out: Any, target: Any, x: Any, source: Any, size: Any) -> Any:
    """Copy x[source + i] to out[target + i] for i < size, a multiple of 16."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        to, first_to, values, first, number = args
        kind = ir.VectorType(values.type.pointee, LANES).as_pointer()
        align = sig.args[0].dtype.bitwidth // 8
        with steps(builder, number) as (i, _count):
            some = builder.load(builder.bitcast(builder.gep(values, [builder.add(first, i)]), kind), align=align)
            builder.store(some, builder.bitcast(builder.gep(to, [builder.add(first_to, i)]), kind), align=align)
        return context.get_dummy_value()

    return types.void(out, types.int64, out, types.int64, types.int64), generate


@intrinsic
def clear(_: Any, out: Any, size: Any) -> Any:
    """Set out[i] to 0 for i < size, a multiple of 16."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        with steps(builder, args[1]) as (i, _count):
            store16(builder, constant(0.0), args[0], i, types.float32)
        return context.get_dummy_value()

    return types.void(F32P, types.int64), generate


@intrinsic
def divide_by_total(_: Any, out: Any, target: Any, x: Any, totals: Any, size: Any) -> Any:
    """Write out[target + i] = x[i] / the sum of 16 totals, for i < size, a multiple of 16."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        to, first, values, parts, number = args
        parts = load16(builder, parts, ir.Constant(I64, 0), types.float32)
        total = reduced(builder, "fadd", parts, ir.Constant(F32, 0.0))
        factor = splat(builder, builder.fdiv(ir.Constant(F32, 1.0), total))
        with steps(builder, number) as (i, _count):
            value = builder.fmul(load16(builder, values, i, types.float32), factor)
            store16(builder, value, to, builder.add(first, i), sig.args[0].dtype)
        return context.get_dummy_value()

    return types.void(out, types.int64, F32P, F32P, types.int64), generate


def prefetch_line(builder: ir.IRBuilder, address: ir.Value) -> None:
    byte = ir.IntType(8).as_pointer()
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32]), "llvm.prefetch.p0"
    )
    read, keep, data = ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)
    builder.call(function, [builder.bitcast(address, byte), read, keep, data])


@intrinsic
def prefetch(_: Any, table: Any, count: Any, offset: Any, size: Any) -> Any:
    """Prefetch `size` bytes from each of the first `count` addresses in `table`, plus `offset`. Addresses are taken in
    order, so that the processor's own prefetcher also finds adjacent ranges."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        addresses, number, start, length = args
        line = ir.Constant(I64, CACHE_LINE_BYTES)
        with cgutils.for_range(builder, number, intp=I64) as loop:
            first = builder.add(builder.load(builder.gep(addresses, [loop.index])), start)
            with cgutils.for_range_slice(builder, ir.Constant(I64, 0), length, line, intp=I64) as (i, _n):
                prefetch_line(builder, builder.inttoptr(builder.add(first, i), ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.CPointer(types.int64), types.int64, types.int64, types.int64), generate
