"""Grouped products of rows in float8 in plain torch, which has them for Hopper alone."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, offs: Tensor, out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:  # fmt: skip
    """Compute torch._scaled_grouped_mm under the conditions of its kernel (aten/src/ATen/native/cuda/
    GroupedBlas.cpp)."""
    (pairs, inputs), (num_experts, depth, outputs) = a.shape, b.shape
    assert a.dtype == b.dtype == torch.float8_e4m3fn and a.is_contiguous() and b.mT.is_contiguous()
    assert inputs == depth and inputs % 16 == outputs % 16 == 0 and out_dtype == torch.bfloat16
    assert scale_a.shape == (pairs,) and scale_a.is_contiguous() and scale_a.dtype == torch.float32
    assert scale_b.shape == (num_experts, outputs) and scale_b.stride(1) == 1 and scale_b.dtype == torch.float32
    assert offs.shape == (num_experts,) and offs.dtype == torch.int32
    out, start = torch.full((pairs, outputs), torch.nan, dtype=out_dtype), 0
    for expert, end in enumerate(offs.tolist()):
        product = a[start:end].float() @ b[expert].float()
        out[start:end] = (product * scale_a[start:end, None] * scale_b[expert]).to(out_dtype)
        start = end
    return out
