"""The experts of a layer as grouped products of torch, all at once, without waiting for the device. See ops/moe.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.ops.gpu.experts.routing import combine, sort_pairs

ALIGNMENT = 8  # values, 16 bytes: rows of both operands must start there
MAJORS = (9, 10)  # compute capabilities for which torch 2.13 has a grouped product (cuda/GroupedBlas.cpp)


def fits(hidden_size: int, slice_size: int, dtype: torch.dtype) -> bool:
    """Return whether torch's grouped product supports such experts. slice_size: intermediate size on this rank."""
    return dtype == torch.bfloat16 and hidden_size % ALIGNMENT == 0 and slice_size % ALIGNMENT == 0


def has_kernel(device: torch.device) -> bool:
    """Return whether torch has a kernel for this GPU. If not, torch reads `offs` on the host, which is impossible in a
    CUDA graph."""
    return torch.cuda.get_device_capability(device)[0] in MAJORS


def mix_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, activation: Callable[[Tensor], Tensor],
    experts: Tensor, weights: Tensor, biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Compute the experts. The results of a token's experts are summed in the order of `experts`, in any batch.

    x: [tokens, hidden]; gate_up: [num_experts, 2 * intermediate, hidden]; down: [num_experts, hidden, intermediate];
    experts: [tokens, k] int64; weights: [tokens, k]; biases: [num_experts, outputs] each. Returns [tokens, hidden].
    """
    order, tokens, positions, ends, _ = sort_pairs(experts, len(gate_up), len(experts))
    hidden = F.grouped_mm(x[tokens], gate_up.mT, offs=ends)
    if biases is None:
        mixed = F.grouped_mm(activation(hidden), down.mT, offs=ends)
    else:
        chosen = experts.flatten()[order]
        mixed = F.grouped_mm(activation(hidden + biases[0][chosen]), down.mT, offs=ends) + biases[1][chosen]
    return combine(mixed, weights, positions)
