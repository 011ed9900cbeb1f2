"""Grouped products of rows in float8 in plain torch, which has them for Hopper alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_WISE = [F.ScalingType.RowWise.value]


def scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Sequence[Tensor], recipe_a: Sequence[int], swizzle_a: Sequence[int],
    scale_b: Sequence[Tensor], recipe_b: Sequence[int], swizzle_b: Sequence[int],
    offs: Tensor, bias: None, dtype: torch.dtype, contraction: Sequence[int], fast: bool,
) -> Tensor:  # fmt: skip
    """Compute torch._scaled_grouped_mm_v2 under the conditions of its kernel (aten/src/ATen/native/cuda/
    GroupedBlas.cpp)."""
    (pairs, inputs), (num_experts, depth, outputs) = a.shape, b.shape
    (rows,), (columns,) = scale_a, scale_b
    assert list(recipe_a) == list(recipe_b) == ROW_WISE and not swizzle_a and not swizzle_b
    assert dtype == torch.bfloat16 and bias is None and not contraction
    assert a.dtype == b.dtype == torch.float8_e4m3fn and a.is_contiguous() and b.mT.is_contiguous()
    assert inputs == depth and inputs % 16 == outputs % 16 == 0
    assert rows.shape == (pairs,) and rows.is_contiguous() and rows.dtype == torch.float32
    assert columns.shape == (num_experts, outputs) and columns.stride(1) == 1 and columns.dtype == torch.float32
    assert offs.shape == (num_experts,) and offs.dtype == torch.int32
    out, start = torch.full((pairs, outputs), torch.nan, dtype=dtype), 0
    for expert, end in enumerate(offs.tolist()):
        product = a[start:end].float() @ b[expert].float()
        out[start:end] = (product * rows[start:end, None] * columns[expert]).to(dtype)
        start = end
    return out
