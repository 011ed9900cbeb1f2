"""Products of bfloat16 in the matrix registers of Intel's AMX (Software Developer's Manual, volume 1, chapter 18).

A register has up to 16 rows of 64 bytes. One instruction adds to 16 x 16 sums in float32 the products of 16 rows of 32
inputs with 32 inputs of 16 outputs: `STEP` inputs of a column of a packed weight (linear.py), whose pairs of inputs lie
as the instruction wants them. A row's sums do not depend on the other rows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.devices.amx_permission import may_use_amx
from engine.model.ops.cpu.kernel import I64
from engine.model.ops.cpu.vector import CACHE_LINE_BYTES, F32, LANES, load16, prefetch_line, store16

I8, I16 = ir.IntType(8), ir.IntType(16)
ROWS = 16  # of a register
STEP = 32  # inputs of an instruction
ROW_BYTES = 64  # of a register
VECTORS = 4  # of 16 outputs of a column
WORD_BYTES = 4  # a pair of inputs
SUMS, X, WEIGHT, X_REST, WEIGHT_REST = 0, 4, 5, 6, 7  # numbers of registers; four have sums
CONFIG_BYTES, PALETTE, FIRST_BYTES, FIRST_ROWS = 64, 1, 16, 48  # of the configuration: LDTILECFG
HAS_AMX = may_use_amx()


def call(builder: ir.IRBuilder, name: str, *args: ir.Value) -> None:
    signature = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, signature, f"llvm.x86.{name}"), args)


def number(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def register(value: int) -> ir.Constant:
    return ir.Constant(I8, value)


def as_bytes(builder: ir.IRBuilder, pointer: ir.Value, offset: ir.Value) -> ir.Value:
    return builder.gep(builder.bitcast(pointer, I8.as_pointer()), [offset])


@intrinsic
def configure(_: Any, rows: Any, inputs: Any) -> Any:
    """Give this thread's registers their sizes, for `rows` rows of x (1 to 16) and any multiple of 2 of `inputs`."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        count, size = args
        memory = cgutils.alloca_once(builder, ir.ArrayType(I8, CONFIG_BYTES))
        memory.align = CONFIG_BYTES
        builder.store(ir.Constant(ir.ArrayType(I8, CONFIG_BYTES), None), memory)
        config = builder.bitcast(memory, I8.as_pointer())
        builder.store(ir.Constant(I8, PALETTE), config)
        rest = builder.srem(size, number(STEP))
        pairs = builder.sdiv(rest, number(2))
        full, whole = number(ROW_BYTES), number(ROWS)
        sizes = dict.fromkeys(range(SUMS, SUMS + VECTORS), (count, full))
        sizes |= {X: (count, full), WEIGHT: (whole, full)}
        # a register of no inputs is one of two inputs, which nobody reads
        sizes |= {X_REST: (count, at_least(builder, builder.mul(rest, number(2)), WORD_BYTES))}
        sizes |= {WEIGHT_REST: (at_least(builder, pairs, 1), full)}
        for tile, (height, width) in sizes.items():
            place = builder.gep(config, [number(FIRST_BYTES + 2 * tile)])
            builder.store(builder.trunc(width, I16), builder.bitcast(place, I16.as_pointer()), align=2)
            builder.store(builder.trunc(height, I8), builder.gep(config, [number(FIRST_ROWS + tile)]))
        call(builder, "ldtilecfg", config)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def at_least(builder: ir.IRBuilder, value: ir.Value, least: int) -> ir.Value:
    return builder.select(builder.icmp_signed(">", value, number(least)), value, number(least))


@intrinsic
def release(_: Any) -> Any:
    """Give the registers up, so that the system need not save them."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def multiply_16(
    _: Any, out: Any, out_stride: Any, x: Any, x_stride: Any, column: Any, bias: Any, inputs: Any, rows: Any,
    ahead: Any, lines: Any,
) -> Any:  # fmt: skip
    """Compute out[r, c] = bias[c] + sum over i < inputs of x[r, i] * column[i, c], for the `rows` rows for which the
    registers are configured, and 64 columns. bias: a null pointer if there is none. out: of x's type or float32. Each
    step prefetches `lines` cache lines, beginning at the address `ahead`. For bfloat16 only."""
    dtype, out_dtype = x.dtype, out.dtype

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        if dtype != types.uint16:  # never called
            return context.get_dummy_value()
        target, target_stride, left, left_stride, right, offset, size, count, wanted, wanted_lines = args
        row_bytes = builder.mul(left_stride, number(2))
        pair_bytes = number(VECTORS * LANES * WORD_BYTES)

        def add(first: ir.Value, x_register: int, weight_register: int) -> None:
            """Add the products of the inputs from `first` on."""
            call(
                builder, "tileloadd64", register(x_register),
                as_bytes(builder, left, builder.mul(first, number(2))), row_bytes,
            )  # fmt: skip
            start = builder.mul(builder.sdiv(first, number(2)), pair_bytes)
            for vector in range(VECTORS):
                place = builder.add(start, number(vector * LANES * WORD_BYTES))
                call(builder, "tileloadd64", register(weight_register), as_bytes(builder, right, place), pair_bytes)
                call(builder, "tdpbf16ps", *map(register, (SUMS + vector, x_register, weight_register)))

        for vector in range(VECTORS):
            call(builder, "tilezero", register(SUMS + vector))
        steps = builder.sdiv(size, number(STEP))
        with cgutils.for_range(builder, steps, intp=I64) as loop:
            add(builder.mul(loop.index, number(STEP)), X, WEIGHT)
            here = builder.add(wanted, builder.mul(loop.index, builder.mul(wanted_lines, number(CACHE_LINE_BYTES))))
            with cgutils.for_range(builder, wanted_lines, intp=I64) as line:
                address = builder.add(here, builder.mul(line.index, number(CACHE_LINE_BYTES)))
                prefetch_line(builder, builder.inttoptr(address, I8.as_pointer()))
        whole = builder.mul(steps, number(STEP))
        with builder.if_then(builder.icmp_signed("<", whole, size)):
            add(whole, X_REST, WEIGHT_REST)
        sums = cgutils.alloca_once(builder, ir.ArrayType(F32, ROWS * VECTORS * LANES))
        sums.align = CACHE_LINE_BYTES
        stride = number(VECTORS * LANES * WORD_BYTES)
        for vector in range(VECTORS):
            place = as_bytes(builder, sums, number(vector * ROW_BYTES))
            call(builder, "tilestored64", register(SUMS + vector), place, stride)
        found = builder.bitcast(sums, F32.as_pointer())
        has_bias = builder.icmp_signed("!=", builder.ptrtoint(offset, I64), number(0))
        with cgutils.for_range(builder, count, intp=I64) as loop:
            source = builder.mul(loop.index, number(VECTORS * LANES))
            place = builder.mul(loop.index, target_stride)
            for vector in range(VECTORS):
                shift = number(vector * LANES)
                total = load16(builder, found, builder.add(source, shift), types.float32)
                with builder.if_else(has_bias) as (then, otherwise):
                    with then:
                        biased = builder.fadd(total, load16(builder, offset, shift, dtype))
                        after_then = builder.block
                    with otherwise:
                        after_otherwise = builder.block
                result = builder.phi(total.type)
                result.add_incoming(biased, after_then)
                result.add_incoming(total, after_otherwise)
                store16(builder, result, target, builder.add(place, shift), out_dtype)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(out, i64, x, i64, column, bias, i64, i64, i64, i64), generate
