"""Puts what travels with a row into one row of bytes: one exchange is faster than three."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Return [rows, bytes]. places: [rows, k], below 2 ** 31."""
    parts = x, weights.to(x.dtype), places.int()
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def unpack(packed: Tensor, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the x, places (int32) and weights of packed rows."""
    sizes = [k * dtype.itemsize, k * 4]
    columns = packed.split([packed.shape[1] - sum(sizes), *sizes], dim=1)
    x, weights, places = (
        column.clone(memory_format=torch.contiguous_format).view(kind)  # a view needs an aligned address
        for column, kind in zip(columns, (dtype, dtype, torch.int32), strict=True)
    )
    return x, places, weights
