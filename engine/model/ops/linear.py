"""The product of a linear layer.

linear(x, weight, bias) -> [tokens, outputs]
    x: [tokens, inputs]; weight: [outputs, inputs], or what `pack` made of it
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.ops.dispatch import CPU_DTYPES

BLOCK_INPUTS = 1024  # that oneDNN sums at a time, but for a row that is alone, which it sums in one go


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A row has the same bits beside any others, on a CPU with a packed weight: one that is alone is computed twice."""
    if x.device.type == "cpu" and len(x) == 1 and x.shape[1] > BLOCK_INPUTS:
        return multiply(torch.cat((x, x)), weight, bias)[:1]
    return multiply(x, weight, bias)


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
    return torch.ops.mkldnn._reorder_linear_weight(weight)
