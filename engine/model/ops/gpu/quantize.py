"""Quantizes the inputs of quantized weights, in Triton: one pass replaces eight small kernels, which in decode would
take as long as the product itself. See `quantize_rows` in quantization/weight.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.ops.gpu import dependent_launch
from engine.model.quantization.rows import QuantizedRows, RowFormat
from engine.model.quantization.weight import FP8, FP8_MAX, INT8_MAX

ROUNDS = 12582912.0  # 1.5 * 2^23: floats of this size are integers, so adding it rounds to the nearest, ties to even


@triton.jit
def round_groups(wide, largest, SIZE: tl.constexpr, GROUP: tl.constexpr, INTEGER: tl.constexpr, ROUNDS: tl.constexpr):
    """Scale and round wide [SIZE] float32. Returns the rounded numbers [SIZE], and the scale of each GROUP of
    neighbours [SIZE / GROUP]."""
    groups = wide.reshape(SIZE // GROUP, GROUP)
    step = tl.div_rn(tl.maximum(tl.max(tl.abs(groups), 1), 1e-12), largest)
    groups = tl.clamp(tl.div_rn(groups, tl.zeros_like(groups) + step[:, None]), -largest, largest)
    if INTEGER:
        groups = (groups + ROUNDS) - ROUNDS
    return groups.reshape(SIZE), step


@triton.jit(do_not_specialize=["rows", "scale_stride", "group_stride"])  # they change with the number of tokens
def quantize_kernel(
    x, values, scale, rows, stride, groups, largest, scale_stride, group_stride,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, INTEGER: tl.constexpr, ROUNDS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Quantize a group of SIZE columns of a row. Grid (rows, groups). Rows from `rows` on are filled with zeros."""
    dependent_launch.begin(DEPENDENT)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = group * SIZE + tl.arange(0, SIZE_PAD)
    inside = tl.arange(0, SIZE_PAD) < SIZE
    wide = tl.load(x + row * stride + i, mask=inside & (row < rows), other=0.0).to(tl.float32)
    rounded, step = round_groups(wide, largest, SIZE_PAD, SIZE_PAD, INTEGER, ROUNDS)
    tl.store(values + row * groups * SIZE + i, rounded.to(values.dtype.element_ty), mask=inside)
    tl.store(scale + row * scale_stride + group * group_stride + tl.arange(0, 1), step)


def quantize_rows(x: Tensor, dtype: torch.dtype, group_size: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantize x [rows, columns], of any row stride: values [rows, columns], scale [rows, groups] float32."""
    size = group_size or x.shape[1]
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(len(x), x.shape[1] // size, dtype=torch.float32, device=x.device)
    quantize_into(x, values, scale, size)
    return values, scale


def quantize(x: Tensor, format: RowFormat) -> QuantizedRows:
    """Quantize x [rows, columns], of any row stride, for a product."""
    result = empty_rows(x, x.shape[1], format)
    quantize_into(x, result.values, result.scale, format.group_size or x.shape[1])
    return result


def empty_rows(x: Tensor, columns: int, format: RowFormat) -> QuantizedRows:
    """Return memory for as many rows as x has, with `columns` columns."""
    (dtype, size), rows, device = format, len(x), x.device
    if size is None:
        scale = torch.empty(rows, 1, dtype=torch.float32, device=device)
    else:
        rows = triton.cdiv(rows, 4) * 4
        scale = torch.empty(columns // size, rows, dtype=torch.float32, device=device).T
    return QuantizedRows(torch.empty(rows, columns, dtype=dtype, device=device), scale, len(x), x.dtype)


def quantize_into(x: Tensor, values: Tensor, scale: Tensor, size: int) -> None:
    rows, groups = scale.shape
    pad = triton.next_power_of_2(size)
    quantize_kernel[rows, groups](
        x, values, scale, len(x), x.stride(0), groups, *scale_arguments(values, scale), SIZE=size, SIZE_PAD=pad,
        **rounding(values.dtype), num_warps=min(16, max(1, pad // 512)), **dependent_launch.options(x.device),
    )  # fmt: skip


def scale_arguments(values: Tensor, scale: Tensor) -> tuple[float, int, int]:
    """Return the largest number of the values' dtype, and the strides of the scales."""
    return FP8_MAX if values.dtype == FP8 else INT8_MAX, scale.stride(0), scale.stride(1)


def rounding(dtype: torch.dtype) -> dict[str, bool | float]:
    return {"INTEGER": dtype == torch.int8, "ROUNDS": ROUNDS}
