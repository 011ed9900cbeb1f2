"""Quantized weights of all experts of a layer, in one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """A weight [experts, outputs, inputs] in the form that kernels read."""

    values: Tensor
    """[experts, outputs, inputs] float8_e4m3fn or int8. For int4 [experts, outputs, inputs / 2] uint8, two codes to a
    byte, the first in the low bits; for MXFP4 the same as [experts, outputs, inputs / 32, 16]."""
    scales: Tensor
    """[experts, outputs, groups] float32; for MXFP4 uint8, exponents of 2."""
    offsets: Tensor | None
    """[experts, outputs, groups] float32 for int4, where a weight is code * scale + offset; None for other formats."""
    inputs: int
    activations: torch.dtype | None = None
    """The dtype to which inputs should be rounded (float8_e4m3fn or int8); None if they should not."""

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, outputs, _ = self.scales.shape
        return experts, outputs, self.inputs

    @property
    def group_size(self) -> int:
        return self.inputs // self.scales.shape[2]

    @property
    def format(self) -> Literal["mxfp4", "int4", "float8", "int8"]:
        if self.scales.dtype == torch.uint8:
            return "mxfp4"
        if self.offsets is not None:
            return "int4"
        return "int8" if self.values.dtype == torch.int8 else "float8"

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weights, [experts, outputs, inputs]."""
        if self.format in ("mxfp4", "int4"):
            pairs = self.values.flatten(2)
            codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(2).long()
        if self.format == "mxfp4":
            values, scales = mxfp4_numbers(codes), torch.exp2(self.scales.float() - 127)
        else:
            values, scales = codes if self.format == "int4" else self.values, self.scales
        wide = values.float().unflatten(2, (scales.shape[2], -1)) * scales[..., None]
        if self.offsets is not None:
            wide += self.offsets[..., None]
        return wide.flatten(2).to(dtype)


def mxfp4_numbers(codes: Tensor) -> Tensor:
    """Return the number that each code of E2M1 stands for: a sign, two bits of exponent and one of fraction."""
    magnitudes = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), device=codes.device)
    return magnitudes[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
