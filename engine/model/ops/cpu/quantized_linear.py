"""Products with quantized weights on a CPU, by torch's own kernels, where they pay: docs/quantization.md."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.quantization.packing import pack_nibbles
from engine.model.quantization.weight import QuantizedWeight

INT4_GROUPS = (32, 64, 128, 256)  # sizes that torch's kernel takes
MANY_ROWS = 128  # dequantizing int4 in every call pays from here on
SLICE = 1024  # outputs dequantized at a time, which stay in the caches
ZERO_POINT = 128  # of the inputs: oneDNN is only fast for unsigned ones


def select(weight: QuantizedWeight, dtype: torch.dtype) -> Int8 | Int4 | None:
    if weight.activations == torch.int8 and weight.scale.shape[1] == 1 and weight.zero is None and onednn_int8():
        return Int8(weight)
    if weight.bits == 4 and weight.group_size in INT4_GROUPS and weight.values.shape[0] % 16 == 0:
        return Int4(weight, dtype)
    return None


def onednn_int8() -> bool:
    """Whether oneDNN multiplies int8: without VNNI it keeps sums of products in 16 bits, too few for these inputs."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


class Int8:
    """int8 x int8 by oneDNN, with a scale per output and, computed in every call, per row of the input."""

    def __init__(self, weight: QuantizedWeight):
        self.values = torch.ops.onednn.qlinear_prepack(weight.values, None)
        self.scale = weight.scale.flatten().contiguous()
        self.zero = torch.zeros(len(self.scale), dtype=torch.int64)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).float().clamp_(min=1e-12) / 127
        values = (x / scale).round_().add_(ZERO_POINT).to(torch.uint8)
        out = torch.ops.onednn.qlinear_pointwise(
            values, 1.0, ZERO_POINT, self.values, self.scale, self.zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
        out = out.mul_(scale)
        return (out if bias is None else out.add_(bias)).to(x.dtype)


class Int4:
    """int4 with a scale for every 32 to 256 inputs.

    A few rows, as in decoding, are multiplied by the packed weight, which reads a quarter of bfloat16's bytes. That
    kernel's time grows with every row, so for many rows, as in a prompt, slices of the weight are dequantized in every
    call. Both forms together take a byte per weight.
    """

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype):
        self.group_size = weight.group_size
        # the kernel wants unsigned values q, and computes (q - 8) * scale + offset
        self.values = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.values.int() + 8, 1)
        offset = torch.zeros_like(weight.scale) if weight.zero is None else -weight.zero * weight.scale
        self.scale_and_offset = torch.stack([weight.scale.T, offset.T], dim=-1).to(dtype).contiguous()
        self.nibbles = pack_nibbles(weight.values + 8)
        self.scale, self.offset = (t.to(dtype)[..., None] for t in (weight.scale, offset))
        byte = torch.arange(256, dtype=torch.int32)
        self.pairs = torch.stack([(byte >> 4) - 8, (byte & 15) - 8], dim=-1).to(dtype)  # values of every byte
        self.word = torch.int32 if dtype.itemsize == 2 else torch.int64  # as large as a pair

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) < MANY_ROWS:
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x.contiguous(), self.values, self.group_size, self.scale_and_offset
            )
            return out if bias is None else out.add_(bias)
        slices = range(0, len(self.nibbles), SLICE)
        out = torch.cat([F.linear(x, self.rows(slice(start, start + SLICE))) for start in slices], dim=1)
        return out if bias is None else out.add_(bias)

    def rows(self, rows: slice) -> Tensor:
        """Dequantize rows [rows, inputs] of the weight, by a table with the two values of every byte in one word."""
        bytes = self.nibbles[rows]
        pairs = self.pairs.view(self.word).flatten().index_select(0, bytes.flatten().int())
        values = pairs.view(self.pairs.dtype).view(len(bytes), -1, self.group_size)
        return values.mul_(self.scale[rows]).add_(self.offset[rows]).flatten(1)
