"""Products with quantized weights on an NVIDIA GPU, by torch's kernels: float8 and int8. Other weights are
dequantized as they are loaded. Nothing is copied to the host, so the products can be part of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.ops import dispatch
from engine.model.quantization.rows import QuantizedRows, RowFormat
from engine.model.quantization.weight import FP8, QuantizedWeight, quantize_rows

BLOCK = 128  # rows and columns that share a scale in block-wise FP8
INT8_ROWS = 32  # _int_mm needs at least 17

Multiply = Callable[[Tensor, Tensor | None], Tensor]


def select(weight: QuantizedWeight, dtype: torch.dtype) -> Multiply | None:
    capability = torch.cuda.get_device_capability(weight.values.device)
    outputs, inputs = weight.values.shape
    per_row = weight.scale.shape[1] == 1
    if weight.activations == FP8 and outputs % 16 == inputs % 16 == 0 and dtype == torch.bfloat16:
        if per_row and capability >= (8, 9):
            return RowFP8(weight)
        # cuBLAS supports it on Hopper only
        if capability[0] == 9 and cuda_version() >= (12, 9) and in_square_blocks(weight) and dispatch.triton_found():
            return BlockFP8(weight)
        if capability >= (8, 9):
            return RowFP8(with_scale_per_output(weight))
    if weight.activations == torch.int8 and per_row and weight.zero is None and outputs % 8 == inputs % 8 == 0:
        return Int8(weight)
    return None


def with_scale_per_output(weight: QuantizedWeight) -> QuantizedWeight:
    """Quantize a float8 weight again, with one scale per output. The error that this adds is no larger than the
    rounding of float8."""
    values, scale = quantize_rows(weight.dequantize(torch.float32), FP8)
    return replace(weight, values=values, scale=scale)


def cuda_version() -> tuple[int, ...]:
    return tuple(map(int, (torch.version.cuda or "0").split(".")))


def in_square_blocks(weight: QuantizedWeight) -> bool:
    outputs, inputs = weight.values.shape
    if weight.group_size != BLOCK or inputs % BLOCK or outputs % BLOCK:
        return False
    blocks = weight.scale.unflatten(0, (-1, BLOCK))
    return bool((blocks == blocks[:, :1]).all())  # a rank's rows may begin in the middle of a block


def quantized(x: Tensor | QuantizedRows, format: RowFormat) -> QuantizedRows:
    """Return the rows in a format. They are in it already if the kernel that computed them has quantized them
    (fused_quantize.py)."""
    if isinstance(x, QuantizedRows):
        return x
    if dispatch.triton_found():
        from engine.model.ops.gpu import quantize

        return quantize.quantize(x, format)
    return QuantizedRows(*quantize_rows(x, format.dtype), len(x), x.dtype)


class RowFP8:
    """A product float8 x float8, with a scale per output, and one per input row, which each call computes."""

    format = RowFormat(FP8)

    def __init__(self, weight: QuantizedWeight):
        self.values = weight.values.T  # column-major, as the kernel needs it
        self.scale = weight.scale.T.contiguous()  # [1, outputs]

    def __call__(self, x: Tensor | QuantizedRows, bias: Tensor | None) -> Tensor:
        values, scale, _, dtype = quantized(x, self.format)
        return torch._scaled_mm(values, self.values, scale, self.scale, bias=bias, out_dtype=dtype, use_fast_accum=True)


class BlockFP8:
    """A product float8 x float8, with a scale per 128 x 128 weights and per 128 inputs of each row."""

    format = RowFormat(FP8, BLOCK)

    def __init__(self, weight: QuantizedWeight):
        self.values = weight.values.T
        scale = weight.scale[::BLOCK]  # [outputs / 128, inputs / 128]
        # [inputs / 128, rounded up to a multiple of 4; outputs / 128], the inputs next to each other
        self.scale = F.pad(scale, (0, -scale.shape[1] % 4)).contiguous().T

    def __call__(self, x: Tensor | QuantizedRows, bias: Tensor | None) -> Tensor:
        values, scale, rows, dtype = quantized(x, self.format)
        kind = F.ScalingType
        out = F.scaled_mm(
            values, self.values,
            scale, kind.BlockWise1x128,
            self.scale, kind.BlockWise128x128,
            output_dtype=dtype,
        )  # fmt: skip
        return out[:rows] if bias is None else out[:rows] + bias


class Int8:
    """A product int8 x int8, with a scale per output, and one per input row, which each call computes."""

    format = RowFormat(torch.int8)

    def __init__(self, weight: QuantizedWeight):
        self.values = weight.values.T
        self.scale = weight.scale.T.contiguous()

    def __call__(self, x: Tensor | QuantizedRows, bias: Tensor | None) -> Tensor:
        values, scale, rows, dtype = quantized(x, self.format)
        if rows < INT8_ROWS:
            values = F.pad(values, (0, 0, 0, INT8_ROWS - rows))
        out = torch._int_mm(values, self.values)[:rows].float() * scale * self.scale
        return (out if bias is None else out + bias).to(dtype)
