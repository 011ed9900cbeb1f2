"""The experts of a layer as grouped products of torch, all at once, without waiting for the device. See ops/moe.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.ops.gpu import quantize
from engine.model.ops.gpu.experts.moe import activated, row_format
from engine.model.ops.gpu.experts.routing import combine, sort_pairs
from engine.model.quantization.packed_experts import PackedExperts
from engine.model.quantization.rows import QuantizedRows, RowFormat
from engine.model.quantization.weight import FP8

ALIGNMENT = 16  # bytes: rows of both operands must start there; in float8, both sizes are multiples of it
MAJORS = (9, 10)  # compute capabilities for which torch 2.13 has a grouped product (cuda/GroupedBlas.cpp)
FLOAT8_MAJOR = 9  # the one for which it has a grouped product of float8 with a scale per row (cuda/ScaledGroupMM.cu)


def fits(hidden_size: int, slice_size: int, dtype: torch.dtype) -> bool:
    """Return whether torch's grouped product supports such experts. slice_size: intermediate size on this rank."""
    values = ALIGNMENT // torch.bfloat16.itemsize
    return dtype == torch.bfloat16 and hidden_size % values == 0 and slice_size % values == 0


def fits_float8(packed: Sequence[Tensor | PackedExperts], dtype: torch.dtype) -> bool:
    """Return whether torch's grouped product supports these experts: rows and weights are float8, each with one
    scale."""
    aligned = all(size % ALIGNMENT == 0 for weight in packed for size in weight.shape[1:])
    return aligned and all(row_format(weight, dtype) == RowFormat(FP8) for weight in packed)


def has_kernel(device: torch.device, float8: bool = False) -> bool:
    """Return whether torch has a kernel for this GPU. If not, torch reads `offs` on the host, which is impossible in a
    CUDA graph, or refuses float8."""
    major = torch.cuda.get_device_capability(device)[0]
    return major == FLOAT8_MAJOR if float8 else major in MAJORS


def mix_experts(
    x: Tensor, gate_up: Tensor | PackedExperts, down: Tensor | PackedExperts, activation: Callable[[Tensor], Tensor],
    experts: Tensor, weights: Tensor, biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Compute the experts. The results of a token's experts are summed in the order of `experts`, in any batch.

    x: [tokens, hidden]; gate_up: [num_experts, 2 * intermediate, hidden]; down: [num_experts, hidden, intermediate];
    experts: [tokens, k] int64; weights: [tokens, k]; biases: [num_experts, outputs] each. Returns [tokens, hidden].
    """
    order, tokens, positions, ends, _ = sort_pairs(experts, gate_up.shape[0], len(experts))
    chosen = None if biases is None else experts.flatten()[order]
    mixed = pair_products(x, gate_up, down, activation, chosen, tokens, ends, biases)
    return combine(mixed, weights, positions)


def mix_some_experts(
    x: Tensor, gate_up: Tensor | PackedExperts, down: Tensor | PackedExperts, activation: Callable[[Tensor], Tensor],
    experts: Tensor, weights: Tensor, biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Compute the experts that this rank has. Others, whose number is `num_experts`, are left out of the sum."""
    num_experts = gate_up.shape[0]
    order, tokens, positions, ends, _ = sort_pairs(experts, num_experts, len(experts))
    # nothing was written behind the last pair of this rank, where rows are read, but not multiplied
    behind = torch.arange(len(order), device=order.device) >= ends[-1]
    chosen = None if biases is None else experts.flatten()[order.masked_fill(behind, 0)].clamp(max=num_experts - 1)
    mixed = pair_products(x, gate_up, down, activation, chosen, tokens.masked_fill(behind, 0), ends, biases)
    return combine(mixed, weights, positions, own=experts < num_experts)


def pair_products(
    x: Tensor, gate_up: Tensor | PackedExperts, down: Tensor | PackedExperts, activation: Callable[[Tensor], Tensor],
    chosen: Tensor | None, tokens: Tensor, ends: Tensor, biases: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """Return the product of each pair, [pairs, hidden], by position; undefined from `ends[-1]` on. chosen, tokens:
    [pairs] int64, the expert and the token at each position, the first for biases only; ends: see SortedPairs."""
    (first, second), format = biases or (None, None), row_format(gate_up, x.dtype)
    rows = x[tokens] if format is None else taken(quantize.quantize(x, format), tokens)
    hidden = product(rows, gate_up, ends)
    hidden = hidden if first is None else hidden + first[chosen]
    mixed = product(activated(activation, hidden, row_format(down, x.dtype)), down, ends)
    return mixed if second is None else mixed + second[chosen]


def taken(rows: QuantizedRows, tokens: Tensor) -> QuantizedRows:
    """Return the rows at some numbers [pairs]."""
    values = rows.values.view(torch.uint8)[tokens].view(rows.values.dtype)
    return QuantizedRows(values, rows.scale[tokens], len(tokens), rows.dtype)


def product(x: Tensor | QuantizedRows, weight: Tensor | PackedExperts, ends: Tensor) -> Tensor:
    """Multiply the rows of each expert by its weight: [pairs, inputs] -> [pairs, outputs]."""
    if isinstance(x, Tensor):
        assert isinstance(weight, Tensor), "rows of quantized experts are rounded"
        return F.grouped_mm(x, weight.mT, offs=ends)
    assert isinstance(weight, PackedExperts), "rows are rounded for quantized experts only"
    return torch._scaled_grouped_mm(
        x.values, weight.values.mT, x.scale.flatten(), weight.scales.flatten(1),
        offs=ends, out_dtype=x.dtype, use_fast_accum=True,
    )  # fmt: skip
