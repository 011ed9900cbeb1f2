"""The experts of a layer by torch's grouped products, all at once, without waiting for the device. See ops/moe.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 8  # values, 16 bytes: rows of both operands must start there


def fits(hidden_size: int, slice_size: int, dtype: torch.dtype) -> bool:
    """Whether the product takes such experts. slice_size: intermediate values of each that this rank holds."""
    return dtype == torch.bfloat16 and hidden_size % ALIGNMENT == 0 and slice_size % ALIGNMENT == 0


def has_kernel(device: torch.device) -> bool:
    """Whether torch has a kernel for this GPU: from Hopper on. Elsewhere it loops, and waits."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def mix_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
    experts: Tensor,
    weights: Tensor,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Sum a token's experts in the order of `experts`, whatever else is in the batch."""
    tokens, k = experts.shape
    chosen, order = experts.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(len(gate_up), device=x.device), right=True).int()
    hidden = F.grouped_mm(x[order // k], gate_up.mT, offs=ends)
    hidden = activation(hidden if biases is None else hidden + biases[0][chosen])
    mixed = F.grouped_mm(hidden, down.mT, offs=ends)
    mixed = mixed if biases is None else mixed + biases[1][chosen]
    mixed = mixed[order.argsort()].view(tokens, k, -1)
    return (mixed * weights.unsqueeze(2)).sum(1)
