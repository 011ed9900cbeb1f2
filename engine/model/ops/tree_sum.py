"""Sums tensors of one shape as a binary tree, in float32: ((a + b) + (c + d)) + ((e + f) + (g + h)).

parts: tensors [tokens, size], their number a power of two, with equal strides and each token's values contiguous
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.model.ops import dispatch


def tree_sum(parts: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum, rounded once to `dtype`; None: the dtype of the parts."""
    own, device = parts[0].dtype, parts[0].device
    dtype = dtype or own
    fast = dispatch.module_of(own, device, cpu="linear") if dtype == own else None
    if fast is not None and len(parts) == fast.PARTS:
        total: Tensor = fast.sum_8(parts)
        return total
    return tree_sum_plain([part.float() for part in parts]).to(dtype)


def tree_sum_plain(parts: Sequence[Tensor]) -> Tensor:
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
