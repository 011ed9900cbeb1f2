"""Experts' MLPs on a GPU: all experts in two grouped products of torch, so that the host need not know who has tokens.

torch has a kernel for them for bfloat16 from Hopper on, and loops elsewhere. Has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 8  # values, 16 bytes: rows of both operands must start there


def mix_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
    experts: Tensor,
    weights: Tensor,
) -> Tensor:
    """See ops/moe.py. A token's experts are added in the order of `experts`, whatever else is in the batch."""
    tokens, k = experts.shape
    chosen, order = experts.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(len(gate_up), device=x.device), right=True).int()
    hidden = activation(F.grouped_mm(x[order // k], gate_up.mT, offs=ends))
    mixed = F.grouped_mm(hidden, down.mT, offs=ends)
    mixed = mixed[order.argsort()].view(tokens, k, -1)
    return (mixed * weights.unsqueeze(2)).sum(1)


def fits(x: Tensor, down: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.shape[1] % ALIGNMENT == 0 and down.shape[2] % ALIGNMENT == 0
