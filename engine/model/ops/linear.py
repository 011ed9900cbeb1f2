"""The product of a linear layer.

linear(x, weight, bias) -> [tokens, outputs]
    x: [tokens, inputs]; weight: [outputs, inputs], or what `pack` made of it
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.device import numba_found
from engine.model.ops.dispatch import CPU_DTYPES

FEW_ROWS = 256  # with more, oneDNN is faster
BLOCK_INPUTS = 1024  # that oneDNN sums at a time, but for a row that is alone, which it sums in one go
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A row has the same bits beside any others, on a CPU with a packed weight: one that is alone is computed twice,
    unless we have a kernel for it."""
    if weight.is_mkldnn and len(x) <= FEW_ROWS and (few_rows := select_few_rows(weight.dtype, *weight.shape)):
        return few_rows(x, weight, bias)
    if x.device.type == "cpu" and len(x) == 1 and x.shape[1] > BLOCK_INPUTS:
        return multiply(torch.cat((x, x)), weight, bias)[:1]
    return multiply(x, weight, bias)


@cache
def select_few_rows(dtype: torch.dtype, outputs: int, inputs: int) -> Product | None:
    """Return our own kernel for up to FEW_ROWS rows and packed weights of this shape, if it has the bits of oneDNN's,
    which computes the others."""
    if dtype != torch.bfloat16 or not torch.cpu._is_avx512_bf16_supported() or not numba_found():
        return None
    from engine.model.ops.cpu import linear as cpu

    return cpu.select(outputs, inputs)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """GELU of the product, arXiv:1606.08415, with the error function; on a CPU one pass over it."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "gelu", [], "none")
    return F.gelu(F.linear(x, weight, bias))


def pack(weight: Tensor) -> Tensor:
    """Rearrange the weight as oneDNN reads it, so that it is not rearranged in every call; torch.compile does the same
    when it freezes a graph on a CPU. Return it unchanged where oneDNN does not support it."""
    if weight.device.type != "cpu" or weight.dtype not in CPU_DTYPES or not torch.backends.mkldnn.is_available():
        return weight
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    select_few_rows(weight.dtype, *weight.shape)  # now, and not in the first step
    return torch.ops.mkldnn._reorder_linear_weight(weight)
