"""Quantized rows: the input of a product with a quantized weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowFormat(NamedTuple):
    """How a product takes the rows of its input."""

    dtype: torch.dtype
    """float8_e4m3fn or int8."""
    group_size: int | None = None
    """Columns that share a scale; None for whole rows. With groups, the number of rows is padded to a multiple of 4,
    and the scales of a group are adjacent, as cuBLAS needs them."""


class QuantizedRows(NamedTuple):
    """Rows in a format. rows: their number without padding. dtype: that of the product's result."""

    values: Tensor  #: [rows, columns]
    scale: Tensor  #: [rows, groups] float32
    rows: int
    dtype: torch.dtype

    def dequantize(self) -> Tensor:
        """Return the numbers that the rows stand for, [rows, columns] float32, without padding."""
        values, scale = self.values[: self.rows].float(), self.scale[: self.rows]
        return (values.unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)
