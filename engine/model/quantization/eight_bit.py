"""Formats with one byte per weight: a tensor of the weight's shape, and scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.quantization.format import QuantAxis, StoredTensor, per_group, per_row
from engine.model.quantization.weight import FP8, QuantizedWeight
from engine.model.shard import INPUTS, OUTPUTS, Shard

WEIGHT_AXES = (QuantAxis(OUTPUTS), QuantAxis(INPUTS))
DTYPES = {"float": FP8, "int": torch.int8}


@dataclass(frozen=True, slots=True)
class EightBit:
    """Weights stored as `weight` [outputs, inputs] of `dtype` (float8_e4m3fn or int8)."""

    dtype: torch.dtype
    block: tuple[int | None, int | None]
    """Numbers of rows and columns that share a scale. Rows are None if the tensor has one scale; columns are None if
    whole rows share a scale."""
    scale: str
    """Name of the tensor with the scales."""
    zeros: bool
    """Whether there are also zero points, in `weight_zero_point`."""
    activations: torch.dtype | None
    """See QuantizedWeight.activations."""

    def stored_tensors(self, weight: Shard) -> dict[str, StoredTensor]:
        rows, columns = self.block
        axes: tuple[QuantAxis | int, ...] = (1,)
        if rows is not None:
            axes = (QuantAxis(OUTPUTS, rows), 1 if columns is None else QuantAxis(INPUTS, columns))
        tensors = {"weight": StoredTensor(self.dtype, WEIGHT_AXES), self.scale: StoredTensor(torch.float32, axes)}
        return tensors | ({"weight_zero_point": StoredTensor(torch.float32, axes)} if self.zeros else {})

    def decode(self, tensors: dict[str, Tensor], weight: Shard) -> QuantizedWeight:
        zero = self._per_row(tensors["weight_zero_point"], weight) if self.zeros else None
        scale = self._per_row(tensors[self.scale], weight)
        return QuantizedWeight(tensors["weight"], scale, zero, 8, self.activations)

    def _per_row(self, entries: Tensor, weight: Shard) -> Tensor:
        rows, columns = self.block
        if rows is None:
            return entries.expand(weight.local_shape[0], 1)
        entries = per_row(entries, weight, rows)
        return entries if columns is None else per_group(entries, weight, columns)


def eight_bit(
    kind: str, block: tuple[int | None, int | None], scale: str, zeros: bool, activations: str | None
) -> EightBit:
    """Return the format for names of dtypes: `float` (e4m3) or `int`. block, scale, zeros: see EightBit. activations:
    name of the dtype of activations; None if activations are not rounded."""
    return EightBit(DTYPES[kind], block, scale, zeros, None if activations is None else DTYPES[activations])
