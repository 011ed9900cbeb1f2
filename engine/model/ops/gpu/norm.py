"""RMSNorm on a GPU, in Triton: each row is read once. See ops/norm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.ops.gpu import dependent_launch

PROGRAM_VALUES = 2048  # a program takes several short rows, such as heads


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x, y, weight, total, out, rows, stride, y_stride, eps, shift,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ADD: tl.constexpr, SHIFTED: tl.constexpr,
    ROWS: tl.constexpr, SIZE_PAD: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Normalise rows; with ADD, normalise x + y and write the sum to `total`. Grid (rows / ROWS). Row r is head r %
    HEADS of token r // HEADS, whose values start at x + token * stride."""
    dependent_launch.begin(DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, SIZE_PAD)
    inside = (row < rows)[:, None] & (i < SIZE)[None, :]
    source = (row // HEADS).to(tl.int64) * stride + row % HEADS * SIZE
    values = tl.load(x + source[:, None] + i[None, :], mask=inside, other=0.0)
    target = row.to(tl.int64)[:, None] * SIZE + i[None, :]
    if ADD:
        more = tl.load(y + row.to(tl.int64)[:, None] * y_stride + i[None, :], mask=inside, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
        tl.store(total + target, values, mask=inside)
    wide = values.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)[:, None]
    factor = tl.load(weight + i, mask=i < SIZE, other=0.0).to(tl.float32)[None, :]
    # without a shift, rounded before the weight as well, as in the checkpoints' own code
    result = wide * (shift + factor) if SHIFTED else wide.to(values.dtype).to(tl.float32) * factor
    tl.store(out + target, result.to(values.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
    heads, size = (x.shape[1] if x.dim() == 3 else 1), x.shape[-1]
    if heads > 1 and x.stride(1) != size:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, size_pad = x.shape[0] * heads, triton.next_power_of_2(size)
    per_program = max(1, PROGRAM_VALUES // size_pad) if heads > 1 else 1
    rms_norm_kernel[triton.cdiv(rows, per_program),](
        x, x, weight, out, out, rows, x.stride(0), 0, eps, shift,
        HEADS=heads, SIZE=size, ADD=False, SHIFTED=shift != 0.0, ROWS=per_program, SIZE_PAD=size_pad,
        num_warps=num_warps(size_pad), **dependent_launch.options(x.device),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, shift: float) -> tuple[Tensor, Tensor]:
    tokens, size = x.shape
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    size_pad = triton.next_power_of_2(size)
    rms_norm_kernel[tokens,](
        x, y, weight, total, out, tokens, x.stride(0), y.stride(0), eps, shift,
        HEADS=1, SIZE=size, ADD=True, SHIFTED=shift != 0.0, ROWS=1, SIZE_PAD=size_pad, num_warps=num_warps(size_pad),
        **dependent_launch.options(x.device),
    )  # fmt: skip
    return total, out


@triton.jit(do_not_specialize=["rows"])
def gated_rms_norm_kernel(
    x, gate, weight, out, rows, stride, gate_stride, gate_head, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BY_SIGMOID: tl.constexpr, ROWS: tl.constexpr, SIZE_PAD: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Norm ROWS rows, and multiply them by SiLU or the sigmoid of the gate. Grid (rows / ROWS); rows as in
    `rms_norm_kernel`."""
    dependent_launch.begin(DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, SIZE_PAD)
    inside = (row < rows)[:, None] & (i < SIZE)[None, :]
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    values = tl.load(x + (token * stride + head * SIZE)[:, None] + i[None, :], mask=inside, other=0.0)
    place = (token * gate_stride + head * gate_head)[:, None] + i[None, :]
    opened = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    opened = tl.sigmoid(opened) if BY_SIGMOID else opened * tl.sigmoid(opened)
    wide = values.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)[:, None]
    factor = tl.load(weight + i, mask=i < SIZE, other=0.0).to(tl.float32)[None, :]
    normed = (wide.to(values.dtype).to(tl.float32) * factor).to(values.dtype).to(tl.float32)
    target = out + row.to(tl.int64)[:, None] * SIZE + i[None, :]
    tl.store(target, (normed * opened).to(values.dtype), mask=inside)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, by_sigmoid: bool) -> Tensor:
    """Norm heads x [tokens, heads, size], and multiply them by SiLU or the sigmoid of the gate, of the same shape."""
    tokens, heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, size_pad = tokens * heads, triton.next_power_of_2(size)
    per_program = max(1, PROGRAM_VALUES // size_pad)
    gated_rms_norm_kernel[triton.cdiv(rows, per_program),](
        x, gate, weight, out, rows, x.stride(0), *gate.stride()[:2], eps,
        HEADS=heads, SIZE=size, BY_SIGMOID=by_sigmoid, ROWS=per_program, SIZE_PAD=size_pad,
        num_warps=num_warps(size_pad), **dependent_launch.options(x.device),
    )  # fmt: skip
    return out


def num_warps(size_pad: int) -> int:
    return min(16, max(4, size_pad // 1024))
