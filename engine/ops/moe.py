"""Experts' MLPs over the tokens that were routed to them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def mix_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
    experts: Tensor,
    weights: Tensor,
) -> Tensor:
    """Weighted sum of each token's experts: [tokens, hidden].

    x:                [tokens, hidden]
    gate_up:          [num_experts, 2 * intermediate, hidden]
    down:             [num_experts, hidden, intermediate]
    experts, weights: [tokens, k]
    """
    if x.is_cuda:
        from engine.ops.gpu import moe

        if moe.fits(x, down):
            return moe.mix_experts(x, gate_up, down, activation, experts, weights)
    return mix_experts_plain(x, gate_up, down, activation, experts, weights)


def mix_experts_plain(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
    experts: Tensor,
    weights: Tensor,
) -> Tensor:
    """One expert after the other, over the tokens that were routed to it."""
    k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)  # one expert's tokens together, so that each expert runs once
    counts = experts.flatten().bincount(minlength=gate_up.shape[0]).tolist()
    out = torch.zeros_like(x)
    for expert, chosen in enumerate(order.split(counts)):
        if len(chosen):
            tokens = chosen // k
            y = F.linear(activation(F.linear(x[tokens], gate_up[expert])), down[expert])
            out.index_add_(0, tokens, y * weights.flatten()[chosen, None])
    return out
