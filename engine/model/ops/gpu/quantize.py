"""Quantizes the inputs of quantized weights, in Triton: one pass replaces eight small kernels, which in decode would
take as long as the product itself. See `quantize_rows` in quantization/weight.py. Products of int8 with up to MOST rows
are computed here. With more rows, torch computes the product, and a kernel scales it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.ops.gpu import dependent_launch
from engine.model.quantization.rows import QuantizedRows, RowFormat
from engine.model.quantization.weight import FP8, FP8_MAX, INT8_MAX

SCALED_COLUMNS = 1024
MOST = 512  # rows; with more, as in prompts, cuBLAS and a pass over its int32 sums should be faster
TILES = ((16, 64), (64, 64), (128, 128))  # rows and outputs; used is the first that holds all rows, else the last
BLOCK_K = 64
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
    """Quantize x [rows, columns], of any row stride, for a product.

    Groups have run under Triton's interpreter only, not on a GPU yet.
    """
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


@triton.jit(do_not_specialize=["rows"])
def int8_linear_kernel(
    x, rows_scale, values, scale, bias, out, rows, size_n, size_k,
    BIASED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Multiply BLOCK_M rows with BLOCK_N outputs and scale the sums. Grid (rows / BLOCK_M, size_n / BLOCK_N)."""
    dependent_launch.begin(DEPENDENT)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(0, size_k, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        here = (k < size_k)[None, :]
        a = tl.load(x + m[:, None] * size_k + k[None, :], mask=(m < rows)[:, None] & here, other=0)
        b = tl.load(values + n.to(tl.int64)[:, None] * size_k + k[None, :], mask=(n < size_n)[:, None] & here, other=0)
        acc = tl.dot(a, b.trans(), acc, out_dtype=tl.int32)
    wide = acc.to(tl.float32) * tl.load(rows_scale + m, mask=m < rows, other=0.0)[:, None]
    wide *= tl.load(scale + n, mask=n < size_n, other=0.0)[None, :]
    if BIASED:
        wide += tl.load(bias + n, mask=n < size_n, other=0.0).to(tl.float32)[None, :]
    target = out + m.to(tl.int64)[:, None] * size_n + n[None, :]
    tl.store(target, wide.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < size_n)[None, :])


def int8_linear(
    x: Tensor, rows_scale: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiply x [rows, inputs] with values [outputs, inputs], both int8 and contiguous, and scale the sums.

    rows_scale: [rows, 1] float32; scale: [1, outputs] float32. Has run under Triton's interpreter only, not on a GPU
    yet.
    """
    (rows, inputs), outputs = x.shape, len(values)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    block_m, block_n = next((tile for tile in TILES if tile[0] >= rows), TILES[-1])
    int8_linear_kernel[triton.cdiv(rows, block_m), triton.cdiv(outputs, block_n)](
        x, rows_scale, values, scale, out if bias is None else bias, out, rows, outputs, inputs,
        BIASED=bias is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK_K,
        num_warps=8 if block_m > 64 else 4, num_stages=4, **dependent_launch.options(x.device),
    )  # fmt: skip
    return out


@triton.jit
def scale_products_kernel(sums, rows_scale, scale, bias, out, columns, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    """Scale a product of int8. Grid (rows, columns / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < columns
    wide = tl.load(sums + row * columns + i, mask=inside, other=0).to(tl.float32)
    wide = wide * tl.load(rows_scale + row) * tl.load(scale + i, mask=inside, other=0.0)
    if BIASED:
        wide += tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + i, wide.to(out.dtype.element_ty), mask=inside)


def scale_products(sums: Tensor, rows_scale: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Scale products of int8, [rows, columns] int32, and add the bias, in one pass.

    rows_scale: [rows, 1] float32; scale: [1, columns] float32. Has run under Triton's interpreter only, not on a GPU
    yet.
    """
    rows, columns = sums.shape
    out = torch.empty(rows, columns, dtype=dtype, device=sums.device)
    scale_products_kernel[rows, triton.cdiv(columns, SCALED_COLUMNS)](
        sums, rows_scale, scale, sums if bias is None else bias, out, columns,
        BIASED=bias is not None, BLOCK=SCALED_COLUMNS,
    )  # fmt: skip
    return out
