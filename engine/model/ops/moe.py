"""The experts of a layer: the weighted sum of each token's experts, [tokens, hidden].

x:                [tokens, hidden]
gate_up:          [num_experts, 2 * intermediate, hidden]; in the plain version, also a list with one product per expert
down:             [num_experts, hidden, intermediate]; or a list as above
experts, weights: [tokens, k]. With `enable_expert_parallel`, an expert of another rank is num_experts, and
                  the sum leaves it out.
biases:           of gate_up and of down, [num_experts, outputs] each, or None
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from engine.model.ops import dispatch
from engine.model.ops.elementwise.gates import scaled, sigmoid
from engine.model.ops.linear import cpu_kernels, linear, pack
from engine.model.ops.quantized_linear import Multiply, kind, log_once
from engine.model.quantization.packed_experts import PackedExperts
from engine.model.quantization.weight import QuantizedWeight

Activation = Callable[[Tensor], Tensor]
Biases = tuple[Tensor, Tensor] | None
TopK = Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
Packed = Tensor | PackedExperts
Weight = Tensor | Multiply
AddToPairs = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Adds to the products [pairs, outputs] of x [pairs, inputs], of pairs of an expert [pairs] and a token [pairs]."""
MixPacked = Callable[[Tensor, Packed, Packed, Activation, Tensor, Tensor, Biases], Tensor]
MixExperts = Callable[[Tensor, Tensor, Tensor, Activation, Tensor, Tensor, Biases], Tensor]


def select(
    hidden_size: int, slice_size: int, dtype: torch.dtype, device: torch.device, some: bool = False
) -> MixExperts:
    """Return the fastest version. slice_size: intermediate size of each expert on this rank. some: whether this rank
    has only some of the experts."""
    if not dispatch.gpu_kernels(dtype, device):
        return mix_experts_plain
    from engine.model.ops.gpu.experts import grouped_mm, moe

    of_torch = device.type == "cuda" and grouped_mm.fits(hidden_size, slice_size, dtype)
    versions = grouped_mm if of_torch and grouped_mm.has_kernel(device) else moe
    return versions.mix_some_experts if some else versions.mix_experts


def select_packed(
    packed: Sequence[Packed], dtype: torch.dtype, device: torch.device, some: bool = False
) -> MixPacked | None:
    """Return the fastest version for `gate_up` and `down` if they are quantized; None if they were dequantized. some:
    as for `select`."""
    if all(isinstance(weights, Tensor) for weights in packed):
        return None
    from engine.model.ops.gpu.experts import grouped_mm, moe

    of_torch = device.type == "cuda" and grouped_mm.fits_float8(packed, dtype)
    versions = grouped_mm if of_torch and grouped_mm.has_kernel(device, float8=True) else moe
    return versions.mix_some_experts if some else versions.mix_experts


def pack_experts(weights: Iterable[QuantizedWeight], num_experts: int, dtype: torch.dtype) -> Packed:
    """Put the quantized weights of all experts into one tensor for a GPU's kernel; dequantize them if it cannot read
    them."""
    packed: list[Tensor] = []
    for i, weight in enumerate(weights):
        parts = None
        if dispatch.gpu_kernels(dtype, weight.values.device):
            from engine.model.ops.gpu.experts import weights as gpu_weights

            parts = gpu_weights.pack(weight)
        parts = parts or (weight.dequantize(dtype),)
        packed = packed or [part.new_empty(num_experts, *part.shape) for part in parts]
        for target, part in zip(packed, parts, strict=True):
            target[i].copy_(part)
        if i == 0:
            how = "multiplied as they are" if len(parts) > 1 else f"dequantized to {dtype} at load"
            log_once(f"experts, {kind(weight)}: {how}")
    if len(packed) == 1:
        return packed[0]
    offsets = packed[2] if len(packed) > 2 else None
    return PackedExperts(packed[0], packed[1], offsets, weight.values.shape[1], weight.activations)


def select_top_k(dtype: torch.dtype, device: torch.device) -> TopK:
    """Return the fastest version of: logits [tokens, num_experts], k, normalise -> experts [tokens, k] int64, weights
    [tokens, k] of the logits' dtype, largest first. normalise: whether weights are scaled to add up to 1."""
    return dispatch.fastest(top_k_softmax_plain, dtype, device, cpu="moe.routing", gpu="experts.routing")


def top_k_softmax_plain(logits: Tensor, k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    weights, experts = logits.softmax(dim=-1, dtype=torch.float32).topk(k, dim=-1)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return experts, weights.to(logits.dtype)


def select_top_k_sigmoid(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the fastest version of `top_k_sigmoid_plain`. See layers/moe.py."""
    return dispatch.fastest(top_k_sigmoid_plain, torch.float32, device, cpu="moe.routing", gpu="experts.routing")


def top_k_sigmoid_plain(
    logits: Tensor, correction: Tensor, groups: tuple[int, int], k: int, normalise: bool, factor: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Choose experts by sigmoid scores plus a correction, best first: logits [tokens, num_experts] float32, correction
    [num_experts], (num_groups, topk_groups) -> experts [tokens, k] int64, weights [tokens, k] of `dtype`,
    multiplied by `factor`."""
    scores, (num_groups, topk_groups) = sigmoid(logits), groups
    choice = scores + correction
    if num_groups > 1:
        of_groups = choice.unflatten(1, (num_groups, -1)).topk(2, dim=-1).values.sum(-1)
        choice = left_in(choice, of_groups, topk_groups, -torch.inf)
    experts = choice.topk(k, dim=-1).indices
    weights = scores.gather(1, experts)
    if normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return experts, scaled(weights, factor, dtype)


def select_top_k_of_groups(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the fastest version of `top_k_of_groups_plain`."""
    return dispatch.fastest(top_k_of_groups_plain, torch.float32, device, cpu="moe.routing", gpu="experts.routing")


def top_k_of_groups_plain(
    logits: Tensor, groups: tuple[int, int], k: int, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Choose experts by probability, best first, from the groups with the most probable experts: logits [tokens,
    num_experts] float32, (num_groups, topk_groups) -> experts [tokens, k] int64, and as weights their
    probabilities times `factor`, [tokens, k] of `dtype`."""
    scores, (num_groups, topk_groups) = logits.softmax(-1), groups
    if num_groups > 1:
        scores = left_in(scores, scores.unflatten(1, (num_groups, -1)).amax(-1), topk_groups, 0.0)
    weights, experts = scores.topk(k, dim=-1)
    return experts, scaled(weights, factor, dtype)


def left_in(scores: Tensor, of_groups: Tensor, topk_groups: int, rest: float) -> Tensor:
    """Return scores [tokens, num_experts], with `rest` in place of the scores of experts outside the best groups.
    of_groups: [tokens, groups], scores of groups."""
    best = of_groups.topk(topk_groups, dim=-1).indices
    left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, best, False)
    return scores.unflatten(1, (of_groups.shape[1], -1)).masked_fill(left_out[..., None], rest).flatten(1)


def select_add_shared(dtype: torch.dtype, device: torch.device) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return the fastest version of `add_shared_plain`."""
    return dispatch.fastest(add_shared_plain, dtype, device, cpu="moe.experts", gpu="experts.routing")


def add_shared_plain(x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
    """Return x + y, or x + y * sigmoid(gate). x: [tokens, hidden], of the routed experts; y: of the shared one; gate:
    [tokens, 1]."""
    return x + (y if gate is None else y * sigmoid(gate))


def pack_each(weights: Tensor) -> Tensor | list[Weight]:
    """Pack the weights of each expert on a CPU: [experts, outputs, inputs]. Return one tensor, for the kernel that
    multiplies by all experts, or a list of weights packed like those of linear layers."""
    cpu = cpu_kernels() if weights.dtype == torch.bfloat16 else None
    if cpu is None or not cpu.supports(weights[0]):
        return [pack(weight.contiguous()) for weight in weights]
    packed: Tensor | None = None
    for i, weight in enumerate(weights):
        one = cpu.pack(weight.contiguous())
        packed = one.new_empty(len(weights), *one.shape) if packed is None else packed
        packed[i] = one
    assert packed is not None
    return packed


def mix_packed(
    x: Tensor, gate_up: Tensor | list[Weight], down: Tensor | list[Weight], activation: Activation,
    experts: Tensor, weights: Tensor, biases: Biases = None, addends: Sequence[AddToPairs] = (),
) -> Tensor:  # fmt: skip
    """Compute experts whose weights `pack_each` has packed, or quantized ones."""
    if isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        from engine.model.ops.cpu.moe import experts as cpu

        return cpu.mix_experts(x, gate_up, down, activation, experts, weights, biases, addends)
    return mix_experts_plain(x, gate_up, down, activation, experts, weights, biases, addends)


def mix_experts_plain(
    x: Tensor, gate_up: Tensor | list[Weight], down: Tensor | list[Weight], activation: Activation,
    experts: Tensor, weights: Tensor, biases: Biases = None, addends: Sequence[AddToPairs] = (),
) -> Tensor:  # fmt: skip
    """Compute expert by expert, each for the tokens routed to it.

    x: [tokens, hidden]; gate_up: [num_experts, 2 * intermediate, hidden]; down: [num_experts, hidden, intermediate];
    experts: [tokens, k] int64; weights: [tokens, k]; biases: [num_experts, outputs] each; addends: of gate_up and of
    down. Returns [tokens, hidden].
    """
    mixed, order = pair_products(x, gate_up, down, activation, experts, biases, addends)
    return add_pairs(mixed, order, weights)


def pair_products(
    x: Tensor, gate_up: Tensor | list[Weight], down: Tensor | list[Weight], activation: Activation,
    experts: Tensor, biases: Biases, addends: Sequence[AddToPairs],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the products of the pairs of a token and an expert that this rank has, [pairs, hidden], sorted by expert,
    and the numbers of these pairs, [pairs]."""
    chosen, order = experts.flatten().sort(stable=True)
    counts = chosen.bincount(minlength=len(gate_up))[: len(gate_up)].tolist()
    own = sum(counts)
    chosen, order = chosen[:own], order[:own]
    if not own:
        return x[:0], order
    tokens = order // experts.shape[1]
    add_up, add_down = addends or (add_nothing, add_nothing)
    first, second = biases or (None, None)
    rows = x[tokens]
    hidden = products(rows, gate_up, first, counts)
    add_up(hidden, rows, chosen, tokens)
    hidden = activation(hidden)
    mixed = products(hidden, down, second, counts)
    add_down(mixed, hidden, chosen, tokens)
    return mixed, order


def add_pairs(mixed: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's products: [tokens, hidden]. mixed, order: of `pair_products`; weights:
    [tokens, k]."""
    out = mixed.new_zeros(len(weights), mixed.shape[1])
    return out.index_add_(0, order // weights.shape[1], mixed * weights.flatten()[order, None])


def pair_rows(
    x: Tensor, gate_up: Tensor | list[Weight], down: Tensor | list[Weight], activation: Activation,
    experts: Tensor, biases: Biases = None, addends: Sequence[AddToPairs] = (),
) -> Tensor:  # fmt: skip
    """Return the product of each pair of a token and an expert, not weighted: [tokens, k, hidden]; 0 where another rank
    has the expert. Weights as for `mix_packed`."""
    out = x.new_zeros(experts.numel(), x.shape[1])
    if isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        from engine.model.ops.cpu.moe import experts as cpu

        mixed, place = cpu.pair_products(x, gate_up, down, activation, experts, biases, addends)
        places = place.flatten()
        out[places >= 0] = mixed[places[places >= 0]]
    else:
        mixed, order = pair_products(x, gate_up, down, activation, experts, biases, addends)
        out[order] = mixed
    return out.view(*experts.shape, x.shape[1])


def combine_rows(rows: Tensor, experts: Tensor, weights: Tensor, packed: bool) -> Tensor:
    """Return the weighted sum of each token's rows, with the bits of `mix_packed`: [tokens, k, hidden] -> [tokens,
    hidden]. packed: whether `pack_each` has packed both weights of the experts into tensors."""
    mixed = rows.flatten(0, 1)
    if packed:
        from engine.model.ops.cpu.moe import experts as cpu

        return cpu.combine(mixed, torch.arange(len(mixed)), weights)
    order = experts.flatten().sort(stable=True).indices
    return add_pairs(mixed[order], order, weights)


def products(x: Tensor, expert_weights: Tensor | list[Weight], biases: Tensor | None, counts: list[int]) -> Tensor:
    """Multiply x [pairs, inputs] by the experts' weights. counts: number of rows of x for each expert in turn."""
    parts = enumerate(x.split(counts))
    return torch.cat(
        [product(rows, expert_weights[i], None if biases is None else biases[i]) for i, rows in parts if len(rows)]
    )


def add_nothing(out: Tensor, x: Tensor, experts: Tensor, tokens: Tensor) -> None:
    pass


def product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    return linear(x, weight, bias) if isinstance(weight, Tensor) else weight(x, bias)
