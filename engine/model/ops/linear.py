"""Linear layers.

linear(x, weight, bias) -> [tokens, outputs]
    x: [tokens, inputs]; weight: [outputs, inputs], or what `pack` made of it
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.ops.dispatch import CPU_DTYPES


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def pack(weight: Tensor) -> Tensor:
    """The weight as oneDNN wants to read it, so that it is not rearranged in every call; in place of the original.

    Left as it is where there is no oneDNN for it. What torch.compile does when it freezes a graph on a CPU.
    """
    if weight.device.type != "cpu" or weight.dtype not in CPU_DTYPES or not torch.backends.mkldnn.is_available():
        return weight
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight)
