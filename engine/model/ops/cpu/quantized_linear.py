"""Products with weights of eight and four bits on a CPU: docs/quantization.md.

Inputs are also rounded to int8, with a scale for each group of a row. So products within a group are sums of integers,
and a row's result does not depend on other rows. A panel consists of all weights of 64 outputs and is contiguous. A
thread reads it once for every few rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.ops.cpu.integers import (
    MIDDLE,
    PANEL,
    QUAD,
    as_i8,
    as_u8,
    from_bits,
    has_avx2,
    magnitude,
    multiply_panel,
    nearest,
)
from engine.model.ops.cpu.kernel import (
    CpuKernel,
    TokenCount,
    as_bf16,
    as_f32,
    as_i32,
    device_function,
    each_dtype,
    empty,
    kernel,
    load,
    store,
    work,
)
from engine.model.quantization.weight import QuantizedWeight

SMALLEST_BITS = np.float32(1e-12).view(np.int32)  # least magnitude of a group, so that zeros can be scaled
TOKENS = 4  # tokens whose inputs a thread rounds at a time
INPUT_GROUP = 128  # inputs that share a scale, if the checkpoint does not expect them to be rounded
INT8_ROWS, INT4_ROWS = (4, 4) if has_avx2 else (6, 5)  # rows multiplied by a panel at a time, with sums in registers
BLOCK_ROWS = 90  # rows that a thread takes at a time


@device_function
def round_rows(cast: Any, args: Any) -> None:
    """Round inputs to int8. Each group's largest magnitude becomes 127; columns past `width` become 0."""
    x, values, scales, sums = cast(args[1]), as_i8(args[2]), as_f32(args[3]), as_i32(args[4])
    tokens, stride, width, groups, size = args[5], args[6], args[7], args[8], args[9]
    for token in work(args, tokens, TOKENS):
        for group in range(groups):
            source, target = token * stride + group * size, (token * groups + group) * size
            filled = min(size, width - group * size)
            bits = SMALLEST_BITS
            for i in range(filled):
                bits = max(bits, magnitude(load(x, source + i)))
            largest = from_bits(bits)
            factor = np.float32(127.0) / largest
            total = np.int32(0)
            for i in range(filled):
                value = nearest(load(x, source + i) * factor)
                values[target + i] = value
                total += value
            for i in range(filled, size):
                values[target + i] = 0
            scales[token * groups + group] = largest / np.float32(127.0)
            sums[token * groups + group] = total


multiply_int8_row, multiply_int8_tile = multiply_panel(8, 1), multiply_panel(8, INT8_ROWS)
multiply_int4_row, multiply_int4_tile = multiply_panel(4, 1), multiply_panel(4, INT4_ROWS)


@device_function
def multiply_rows(cast: Any, row: Any, tile: Any, tile_rows: Any, bits: Any, args: Any) -> None:
    out, x, x_scales, x_sums = cast(args[1]), args[2], args[3], args[4]
    weights, scales, zeros, bias = args[5], args[6], args[7], cast(args[8])
    tokens, outputs, groups, size = args[9], args[10], args[11], args[12]
    width = groups * size
    blocks = (tokens + BLOCK_ROWS - 1) // BLOCK_ROWS
    items = (outputs + PANEL - 1) // PANEL * blocks
    scratch = np.empty(tile_rows * PANEL, np.float32)
    sums = as_f32(scratch.ctypes.data)
    for item in work(args, items):
        panel, block = item // blocks, item % blocks
        values = as_u8(weights + panel * PANEL * width * bits // 8)
        scale = as_f32(scales + 4 * panel * PANEL * groups)
        zero = as_f32(zeros + 4 * panel * PANEL * groups if zeros else 0)
        filled = min(PANEL, outputs - panel * PANEL)
        for first in range(block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, tokens), tile_rows):
            count = min(tile_rows, tokens - first)
            values_in, scale_in = as_i8(x + first * width), as_f32(x_scales + 4 * first * groups)
            sum_in = as_i32(x_sums + 4 * first * groups)
            if count == 1:
                row(sums, values_in, scale_in, sum_in, 0, values, scale, zero, groups, size)
            else:
                tile(sums, values_in, scale_in, sum_in, count - 1, values, scale, zero, groups, size)
            for r in range(count):
                target = (first + r) * outputs + panel * PANEL
                if args[8]:
                    for o in range(filled):
                        store(out, target + o, sums[r * PANEL + o] + load(bias, panel * PANEL + o))
                else:
                    for o in range(filled):
                        store(out, target + o, sums[r * PANEL + o])
    scratch[0] = 0.0  # Numba frees an array after its last use, and does not see the pointer into it


@kernel
def multiply_int8_bf16(args: Any) -> None:
    multiply_rows(as_bf16, multiply_int8_row, multiply_int8_tile, INT8_ROWS, 8, args)


@kernel
def multiply_int8_f32(args: Any) -> None:
    multiply_rows(as_f32, multiply_int8_row, multiply_int8_tile, INT8_ROWS, 8, args)


@kernel
def multiply_int4_bf16(args: Any) -> None:
    multiply_rows(as_bf16, multiply_int4_row, multiply_int4_tile, INT4_ROWS, 4, args)


ROUND = each_dtype(round_rows)
MULTIPLY_INT8 = CpuKernel({torch.bfloat16: multiply_int8_bf16, torch.float32: multiply_int8_f32})
MULTIPLY_INT4 = CpuKernel({torch.bfloat16: multiply_int4_bf16})


def select(weight: QuantizedWeight, dtype: torch.dtype) -> Integers | None:
    """Return the product with a weight. Returns None if a group of weights does not fill whole 32-bit words, or if
    `dtype` is float32 and the checkpoint does not expect rounded inputs."""
    if weight.values.dtype != torch.int8 or (weight.activations is None and dtype != torch.bfloat16):
        return None
    if weight.scale.shape[1] > 1 and weight.group_size * weight.bits % (8 * QUAD):
        return None
    return Integers(weight)


class Integers:
    """A product of inputs in eight bits with weights in eight or four bits."""

    def __init__(self, weight: QuantizedWeight):
        self.outputs, self.inputs = weight.values.shape
        self.groups = weight.scale.shape[1]
        if weight.activations is None and weight.group_size % INPUT_GROUP == 0:
            self.groups = self.inputs // INPUT_GROUP
        quads = 8 // weight.bits  # quads of inputs in a word
        middle = MIDDLE if weight.bits == 8 else 8
        values = F.pad(weight.values, (0, -self.inputs % (QUAD * quads), 0, -self.outputs % PANEL)).int() + middle
        self.size = values.shape[1] // self.groups
        # [panels, words, quads in a word, inputs of a quad, outputs] -> [panels, words, outputs, inputs], to a byte
        parts = values.view(-1, PANEL, values.shape[1] // (QUAD * quads), quads, QUAD).permute(0, 2, 1, 4, 3)
        self.values = (parts[..., 0] if quads == 1 else parts[..., 0] | parts[..., 1] << 4).to(torch.uint8).contiguous()
        zero = weight.zero
        if weight.bits == 4:
            zero = (torch.zeros_like(weight.scale) if zero is None else zero) + middle
        self.scale, self.zero = self.panels(weight.scale), 0 if zero is None else self.panels(zero)
        self.multiply = MULTIPLY_INT8 if weight.bits == 8 else MULTIPLY_INT4
        for each in self.multiply.entries:  # a head computes logits in float32
            ROUND.compile(each)
            self.multiply.compile(each)

    def panels(self, of_groups: Tensor) -> Tensor:
        """Rearrange entries of groups: [outputs, groups of the weight] -> [panels, groups, outputs of a panel]."""
        padded = F.pad(of_groups, (0, 0, 0, -self.outputs % PANEL))
        padded = padded.repeat_interleave(self.groups // padded.shape[1], dim=1)
        return padded.view(-1, PANEL, self.groups).transpose(1, 2).contiguous()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [tokens, inputs], add bias [outputs]. Returns [tokens, outputs] of x's dtype, bfloat16 or float32.
        Each row of x is rounded to int8, with a float32 scale per group."""
        tokens, groups, size = len(x), self.groups, self.size
        values, scale = empty((tokens, groups * size), torch.int8), empty((tokens, groups), torch.float32)
        sums, out = empty((tokens, groups), torch.int32), empty((tokens, self.outputs), x.dtype)
        ROUND.launch(
            x.dtype, -(-tokens // TOKENS), x, values, scale, sums, TokenCount(tokens), x.stride(0), self.inputs, groups,
            size,
        )  # fmt: skip
        items = -(-tokens // BLOCK_ROWS) * len(self.values)
        self.multiply.launch(
            x.dtype, items, out, values, scale, sums, self.values, self.scale, self.zero, 0 if bias is None else bias,
            TokenCount(tokens), self.outputs, groups, size,
        )  # fmt: skip
        return out
