"""Norms and activations whose results are quantized for the next product in the same pass, in Triton: no bfloat16 is
written in between. Numbers are rounded where the separate kernels (norm.py, activation.py, quantize.py) round them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.ops.gpu import dependent_launch
from engine.model.ops.gpu.activation import gated
from engine.model.ops.gpu.norm import num_warps
from engine.model.ops.gpu.quantize import empty_rows, round_groups, rounding, scale_arguments
from engine.model.quantization.rows import QuantizedRows, RowFormat

BLOCK = 1024  # columns of a program that quantizes groups


@triton.jit(do_not_specialize=["rows", "scale_stride", "group_stride"])  # they change with the number of tokens
def norm_quantize_kernel(
    x, y, weight, total, values, scale, rows, stride, y_stride, eps, shift, largest, scale_stride, group_stride,
    SIZE: tl.constexpr, ADD: tl.constexpr, SHIFTED: tl.constexpr, SIZE_PAD: tl.constexpr, GROUP: tl.constexpr,
    INTEGER: tl.constexpr, ROUNDS: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Normalise and quantize a row of x, or with ADD of x + y, which is also written to `total`. Grid (rows). Rows from
    `rows` on are filled with zeros."""
    dependent_launch.begin(DEPENDENT)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE_PAD)
    inside = (i < SIZE) & (row < rows)
    read = tl.load(x + row * stride + i, mask=inside, other=0.0)
    if ADD:
        more = tl.load(y + row * y_stride + i, mask=inside, other=0.0)
        read = (read.to(tl.float32) + more.to(tl.float32)).to(read.dtype)
        tl.store(total + row * SIZE + i, read, mask=inside)
    wide = read.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    factor = tl.load(weight + i, mask=i < SIZE, other=0.0).to(tl.float32)
    normed = wide * (shift + factor) if SHIFTED else wide.to(read.dtype).to(tl.float32) * factor
    rounded, step = round_groups(normed.to(read.dtype).to(tl.float32), largest, SIZE_PAD, GROUP, INTEGER, ROUNDS)
    tl.store(values + row * SIZE + i, rounded.to(values.dtype.element_ty), mask=i < SIZE)
    group = tl.arange(0, SIZE_PAD // GROUP)
    tl.store(scale + row * scale_stride + group * group_stride, step, mask=group * GROUP < SIZE)


@triton.jit(do_not_specialize=["rows", "scale_stride", "group_stride"])
def gated_quantize_kernel(
    x, values, scale, rows, size, largest, scale_stride, group_stride,
    GELU: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, INTEGER: tl.constexpr, ROUNDS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Quantize act(x[:, :size]) * x[:, size:]. Grid (rows, size / BLOCK). Rows from `rows` on are filled with zeros."""
    dependent_launch.begin(DEPENDENT)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    i = first + tl.arange(0, BLOCK)
    inside = (i < size) & (row < rows)
    x += row * 2 * size
    gate = tl.load(x + i, mask=inside, other=0.0)
    value = tl.load(x + size + i, mask=inside, other=0.0)
    result = gated(gate.to(tl.float32), value.to(tl.float32), GELU).to(gate.dtype)
    rounded, step = round_groups(result.to(tl.float32), largest, BLOCK, GROUP, INTEGER, ROUNDS)
    tl.store(values + row * size + i, rounded.to(values.dtype.element_ty), mask=i < size)
    group = first // GROUP + tl.arange(0, BLOCK // GROUP)
    tl.store(scale + row * scale_stride + group * group_stride, step, mask=group * GROUP < size)


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float, format: RowFormat) -> QuantizedRows:
    """Normalise x [rows, size]."""
    return norm(x, None, weight, eps, shift, format)[1]


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, shift: float, format: RowFormat
) -> tuple[Tensor, QuantizedRows]:
    """Return x + y [rows, size], and its norm."""
    return norm(x, y, weight, eps, shift, format)


def norm(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, shift: float, format: RowFormat
) -> tuple[Tensor, QuantizedRows]:
    size, result = x.shape[1], empty_rows(x, x.shape[1], format)
    total = x if y is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size_pad = triton.next_power_of_2(size)
    norm_quantize_kernel[len(result.values),](
        x, x if y is None else y, weight, total, result.values, result.scale, len(x), x.stride(0),
        0 if y is None else y.stride(0), eps, shift, *scale_arguments(result.values, result.scale),
        SIZE=size, ADD=y is not None, SHIFTED=shift != 0.0, SIZE_PAD=size_pad, GROUP=format.group_size or size_pad,
        **rounding(format.dtype), num_warps=num_warps(size_pad), **dependent_launch.options(x.device),
    )  # fmt: skip
    return total, result


def silu_mul(x: Tensor, format: RowFormat) -> QuantizedRows:
    """Return the gated activation of x [rows, 2 * size]: [rows, size]."""
    return activation(x, format, gelu=False)


def gelu_tanh_mul(x: Tensor, format: RowFormat) -> QuantizedRows:
    return activation(x, format, gelu=True)


def activation(x: Tensor, format: RowFormat, *, gelu: bool) -> QuantizedRows:
    size = x.shape[1] // 2
    result = empty_rows(x, size, format)
    block = BLOCK if format.group_size else triton.next_power_of_2(size)
    gated_quantize_kernel[len(result.values), triton.cdiv(size, block)](
        x, result.values, result.scale, len(x), size, *scale_arguments(result.values, result.scale),
        GELU=gelu, BLOCK=block, GROUP=format.group_size or block, **rounding(format.dtype),
        num_warps=min(16, max(4, block // 1024)), **dependent_launch.options(x.device),
    )  # fmt: skip
    return result


GATED = {"silu": silu_mul, "gelu_pytorch_tanh": gelu_tanh_mul}
