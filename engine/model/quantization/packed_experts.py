"""Quantized weights of all experts of a layer, in one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.model.quantization.e2m1 import doubled, half_scale


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
        values, scales = self.values, self.scales
        if self.format in ("mxfp4", "int4"):
            pairs = values.flatten(2)
            values = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(2)
        if self.format == "mxfp4":
            values, scales = doubled(values), half_scale(scales)
        wide = values.float().unflatten(2, (scales.shape[2], -1)) * scales[..., None]
        if self.offsets is not None:
            wide += self.offsets[..., None]
        return wide.flatten(2).to(dtype)
