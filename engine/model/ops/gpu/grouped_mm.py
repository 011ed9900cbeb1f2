"""Experts' MLPs by torch's grouped products, of all experts at once. See ops/moe.py.

Nothing here waits for the device. Has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 8  # values, 16 bytes: rows of both operands must start there


def fits(hidden_size: int, slice_size: int, dtype: torch.dtype) -> bool:
    """slice_size: of each expert's intermediate values that this rank has."""
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
) -> Tensor:
    """A token's experts are added in the order of `experts`, whatever else is in the batch."""
    tokens, k = experts.shape
    chosen, order = experts.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(len(gate_up), device=x.device), right=True).int()
    hidden = activation(F.grouped_mm(x[order // k], gate_up.mT, offs=ends))
    mixed = F.grouped_mm(hidden, down.mT, offs=ends)
    mixed = mixed[order.argsort()].view(tokens, k, -1)
    return (mixed * weights.unsqueeze(2)).sum(1)
