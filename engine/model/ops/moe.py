"""The experts of a layer: the weighted sum of each token's experts, [tokens, hidden].

x:                [tokens, hidden]
gate_up:          [num_experts, 2 * intermediate, hidden]; in the plain version also a list of what multiplies each
down:             [num_experts, hidden, intermediate]; the same
experts, weights: [tokens, k]
biases:           of gate_up and down, [num_experts, outputs], or None
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.ops import dispatch
from engine.model.ops.linear import linear
from engine.model.ops.quantized_linear import Multiply
from engine.model.quantization.mxfp4 import PackedExperts

Activation = Callable[[Tensor], Tensor]
Biases = tuple[Tensor, Tensor] | None
Packed = Tensor | PackedExperts
Weight = Tensor | Multiply
MixPacked = Callable[[Tensor, Packed, Packed, Activation, Tensor, Tensor, Biases], Tensor]
MixExperts = Callable[[Tensor, Tensor, Tensor, Activation, Tensor, Tensor, Biases], Tensor]


def select(hidden_size: int, slice_size: int, dtype: torch.dtype, device: torch.device) -> MixExperts:
    """The fastest version. slice_size: intermediate values of each expert that this rank holds."""
    if device.type == "cuda":
        from engine.model.ops.gpu import grouped_mm

        if grouped_mm.fits(hidden_size, slice_size, dtype) and grouped_mm.has_kernel(device):
            return grouped_mm.mix_experts
    if dispatch.gpu_kernels(dtype, device):
        from engine.model.ops.gpu import moe

        return moe.mix_experts
    return mix_experts_plain


def select_packed(dtype: torch.dtype, device: torch.device) -> MixPacked | None:
    """The version for weights in MXFP4, or None if there is none: they are dequantized then."""
    if not dispatch.gpu_kernels(dtype, device):
        return None
    from engine.model.ops.gpu import moe

    return moe.mix_experts


def mix_experts_plain(
    x: Tensor,
    gate_up: Tensor | list[Weight],
    down: Tensor | list[Weight],
    activation: Activation,
    experts: Tensor,
    weights: Tensor,
    biases: Biases = None,
) -> Tensor:
    """Compute one expert after the other, each over the tokens routed to it."""
    k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)  # groups the tokens of each expert
    counts = experts.flatten().bincount(minlength=len(gate_up)).tolist()
    out = torch.zeros_like(x)
    for expert, chosen in enumerate(order.split(counts)):
        if len(chosen):
            tokens = chosen // k
            first, second = (None, None) if biases is None else (biases[0][expert], biases[1][expert])
            y = product(activation(product(x[tokens], gate_up[expert], first)), down[expert], second)
            out.index_add_(0, tokens, y * weights.flatten()[chosen, None])
    return out


def product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    return linear(x, weight, bias) if isinstance(weight, Tensor) else weight(x, bias)
