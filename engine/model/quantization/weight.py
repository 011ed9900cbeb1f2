"""A quantized weight, decoded from any format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX, INT8_MAX = 448.0, 127.0


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [outputs, inputs]: (value - zero) * scale."""

    values: Tensor
    """[outputs, inputs] float8_e4m3fn or int8; with 4 bits from -8 to 7."""
    scale: Tensor
    """[outputs, groups] float32, each for `inputs / groups` neighbouring columns."""
    zero: Tensor | None
    """[outputs, groups] float32, or None if all are 0."""
    bits: int
    """Bits of one value."""
    activations: torch.dtype | None
    """The dtype to which the layer's inputs should be rounded (float8_e4m3fn or int8); None if they should not."""

    @property
    def group_size(self) -> int:
        """Number of columns that share a scale."""
        return self.values.shape[1] // self.scale.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return [outputs, inputs], computed in float32 and rounded once. Tests compare every
        product with this weight against it."""
        values = self.values.float().unflatten(1, (-1, self.group_size))
        if self.zero is not None:
            values = values - self.zero[..., None]
        return (values * self.scale[..., None]).flatten(1).to(dtype)

    def rows(self, order: Tensor) -> QuantizedWeight:
        """Return the weight with its rows in this order: [outputs] int64."""
        order = order.to(self.values.device)
        values = self.values.view(torch.int8)[order].view(self.values.dtype)
        zero = None if self.zero is None else self.zero[order]
        return QuantizedWeight(values, self.scale[order], zero, self.bits, self.activations)

    @staticmethod
    def cat(weights: list[QuantizedWeight]) -> QuantizedWeight:
        """Stack weights of the same format and with the same inputs along the outputs."""
        if len(weights) == 1:
            return weights[0]
        groups = max(w.scale.shape[1] for w in weights)
        scale = torch.cat([_widen(w.scale, groups) for w in weights])
        zero = None
        if any(w.zero is not None for w in weights):
            zeros = [torch.zeros_like(w.scale) if w.zero is None else w.zero for w in weights]
            zero = torch.cat([_widen(z, groups) for z in zeros])
        values = torch.cat([w.values.view(torch.int8) for w in weights]).view(weights[0].values.dtype)
        return QuantizedWeight(values, scale, zero, weights[0].bits, weights[0].activations)


def _widen(of_groups: Tensor, groups: int) -> Tensor:
    return of_groups.repeat_interleave(groups // of_groups.shape[1], dim=1)


def quantize_rows(x: Tensor, dtype: torch.dtype, group_size: int | None = None) -> tuple[Tensor, Tensor]:
    """Round x [rows, columns] to `dtype` (float8_e4m3fn or int8). Return values [rows, columns] and scale [rows,
    groups] float32. The scale maps the largest magnitude of each group to the largest number of `dtype`.

    group_size: columns per group; None for whole rows.
    """
    groups = x.float().unflatten(1, (-1, group_size or x.shape[1]))
    largest = FP8_MAX if dtype == FP8 else INT8_MAX
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    values = (groups / scale).clamp(-largest, largest)  # the cast to float8 would turn larger values into NaN
    if dtype == torch.int8:
        values = values.round()
    return values.to(dtype).flatten(1), scale.squeeze(-1)
