"""Mixture of experts. A rank has a slice of every expert or some whole experts (expert_split.py). The layer ends with
one all-reduce, as an ordinary MLP does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from engine.model.config import ModelConfig
from engine.model.config_parts.moe import MoEConfig
from engine.model.expert_split import split_experts
from engine.model.layers.grouped_addend import GroupedAddend
from engine.model.layers.linear import PaddedLinear, Product
from engine.model.layers.mlp import GatedMLP
from engine.model.ops import dispatch, linear, quantized_linear
from engine.model.ops import moe as ops
from engine.model.ops.elementwise import activations
from engine.model.ops.elementwise.gates import select_scaled
from engine.model.quantization.format import StoredWeight, WeightFormat
from engine.model.quantization.online import Online
from engine.model.quantization.weight import QuantizedWeight
from engine.model.shard import INPUTS, OUTPUTS, Shard, Sharded, ShardPlan, Shards, replicated


class RouterProduct(Product):
    """The product of a router: `logits` of x [tokens, hidden] are [tokens, num_experts], in the weight's dtype."""

    dtype_of_weight: ClassVar[torch.dtype | None] = torch.float32
    """None for the model's."""
    weight_name: ClassVar[str] = ""

    def __init__(self, hidden_size: int, moe: MoEConfig):
        super().__init__()
        self.dtype, self.moe = self.dtype_of_weight or self.dtype, moe
        self.weights = {self.weight_name: Shard((moe.num_experts, hidden_size), OUTPUTS, 0, moe.num_experts)}
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size, dtype=self.dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(moe.num_experts), requires_grad=False) if moe.router_bias else None
        self.scaled = select_scaled(self.dtype, self.device)

    def logits(self, x: Tensor) -> Tensor:
        if x.dtype != self.dtype:
            x = self.scaled(x, 1.0, self.dtype)
        out = linear.linear(x, self.weight, self.bias)
        if self.addend is not None:
            self.addend.add([out], x)
        return out[:, : self.moe.num_experts]

    def shards(self) -> Shards:
        bias = {} if self.bias is None else {"bias": replicated(self.bias)}
        return {f"{self.weight_name}.weight".removeprefix("."): replicated(self.weight), **bias}

    def pack(self) -> None:
        weight, bias = linear.pack_outputs(self.weight.data, None if self.bias is None else self.bias.data)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)


class Router(RouterProduct):
    """The router of Mixtral and Qwen: x [tokens, hidden] -> the experts of each token [tokens, k] int64, and their
    weights [tokens, k] in x's dtype."""

    dtype_of_weight = None

    def __init__(self, hidden_size: int, moe: MoEConfig):
        super().__init__(hidden_size, moe)
        self.top_k = ops.select_top_k(self.dtype, self.device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.top_k(self.logits(x), self.moe.experts_per_token, self.moe.norm_topk_prob)


class BiasedRouter(RouterProduct):
    """The router of DeepSeek V3, arXiv:2412.19437, sections 2.1.2 and 2.1.3 (`noaux_tc`), in float32.

    An expert's score is a sigmoid. Experts are chosen by score plus a correction, which balances their load, and only
    from the groups whose two best experts have the largest sum. Weights are scores without the correction.
    """

    def __init__(self, hidden_size: int, moe: MoEConfig):
        super().__init__(hidden_size, moe)
        self.top_k = ops.select_top_k_sigmoid(self.device)
        self.correction = nn.Parameter(torch.empty(moe.num_experts, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        moe, logits = self.moe, self.logits(x)
        groups = moe.num_groups, moe.topk_groups
        options = groups, moe.experts_per_token, moe.norm_topk_prob, moe.routed_scaling_factor, x.dtype
        return self.top_k(logits, self.correction, *options)

    def shards(self) -> Shards:
        return super().shards() | {"e_score_correction_bias": replicated(self.correction)}


class GroupLimitedRouter(RouterProduct):
    """The router of DeepSeek V2, arXiv:2405.04434, section 2.2.2, in float32: a softmax over all experts. Experts are
    chosen from the groups with the highest-scored experts."""

    def __init__(self, hidden_size: int, moe: MoEConfig):
        super().__init__(hidden_size, moe)
        self.top_k = ops.select_top_k_of_groups(self.device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        moe, logits = self.moe, self.logits(x)
        groups = moe.num_groups, moe.topk_groups
        return self.top_k(logits, groups, moe.experts_per_token, moe.routed_scaling_factor, x.dtype)


ROUTERS = {"softmax": Router, "sigmoid": BiasedRouter, "group_limited": GroupLimitedRouter}


class ExpertWeights(NamedTuple):
    """The `gate_up` and `down` weights of each expert, and their biases [experts, outputs]."""

    gate_up: Tensor | list[ops.Weight]
    down: Tensor | list[ops.Weight]
    biases: ops.Biases


class Experts(Sharded):
    """This rank's experts: gated MLPs, sliced or whole.

    gate_up: [experts, 2 * slice, hidden], down: [experts, hidden, slice]

    format: how quantized weights are stored. On a CPU, `pack` converts each expert's weights to a kernel, in `kernels`;
    on a GPU it packs those of all experts into one tensor, in `kept`. It dequantizes weights without a kernel.
    """

    gated: ClassVar[bool] = True
    """Whether there is a `gate`; if not, `gate_up` is [experts, slice, hidden]."""
    orientation_is_known: ClassVar[bool] = False
    """Whether all versions of PEFT write adapters of stacked weights in the same orientation."""
    is_stored_transposed: ClassVar[bool] = False
    """Whether transformers stores stacked weights as [experts, inputs, outputs]."""
    stacked = False
    """Whether the checkpoint holds the weights of all experts in one tensor."""
    kernels: Sequence[ExpertWeights] = ()
    """On a CPU, the packed weights of this rank's experts. If sums have a fixed order, the packed weights of each part
    of these."""
    kept: tuple[Callable[..., Tensor], ops.Packed, ops.Packed] | None = None
    """On a GPU, the op for quantized experts, and their packed `gate_up` and `down`; None if they are not quantized."""
    addends: Sequence[GroupedAddend] = ()
    """What is added to the products of `gate_up` and of `down`; empty if nothing is."""

    def __init__(
        self, hidden_size: int, moe: MoEConfig, activation: str, tp: ShardPlan, format: WeightFormat | None = None
    ):
        super().__init__()
        self.tp, self.num_experts, self.split = tp, moe.num_experts, split_experts(moe.num_experts, hidden_size, tp)
        self.row_size, self.k = hidden_size, moe.experts_per_token
        slices = self.split.slices
        rows = Shard.of_rank((moe.intermediate_size, hidden_size), OUTPUTS, slices, "moe_intermediate_size")
        columns = Shard.of_rank((hidden_size, moe.intermediate_size), INPUTS, slices, "moe_intermediate_size")
        inputs = dict.fromkeys(("gate_up_proj.gate", "gate_up_proj.up") if self.gated else ("up_proj",), rows)
        self.weights = inputs | {"down_proj": columns}
        self.activation = activations.select(activation, self.dtype, self.device)
        self.op = ops.select(hidden_size, rows.size, self.dtype, self.device, self.split.spread)
        self.biases: tuple[Tensor, Tensor] | None = None
        self.online = format if isinstance(format, Online) else None
        if self.online is not None:
            self.online.check(rows)
            self.online.check(columns)
        self.format = format
        self.allocate()

    def allocate(self) -> None:
        """Allocate memory for the weights of `split.own` as they are loaded."""
        self.stored: list[list[StoredWeight]] = []
        self.gate_up: nn.Parameter | None = None
        self.down: nn.Parameter | None = None
        *inputs, down = self.weights
        columns, count = self.weights[down], len(self.split.own)
        if self.format is not None and self.online is None:
            merged = [{name: self.weights[name] for name in inputs}, {down: columns}]
            self.stored = [[StoredWeight(group, self.format) for group in merged] for _ in range(count)]
            self.quantized_parameters = sum(weight.numel for weights in self.stored for weight in weights)
        else:
            rows = len(inputs) * columns.size
            self.gate_up = nn.Parameter(torch.empty(count, rows, self.row_size), requires_grad=False)
            self.down = nn.Parameter(torch.empty(count, self.row_size, columns.size), requires_grad=False)

    @property
    def takes_addends(self) -> bool:
        """Whether `addends` can be added. True if the experts have `kernels`, or if the model is on the meta device.
        Experts that several engines share cannot know what each of these adds."""
        return not self.split.shared and (bool(self.kernels) or self.device.type == "meta")

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return self.tp.ranks.sum(self.partials(x, experts, weights))

    def partials(self, x: Tensor, experts: Tensor, weights: Tensor) -> list[Tensor]:
        """Return this rank's summands of the result. The result is the sum of all ranks' summands."""
        self.split.count(experts.reshape(-1, self.k))  # Llama 4 has a row for each of a token's experts
        return self.split.partials(self, x, experts, weights)

    def serve(self) -> None:
        """Compute this rank's experts for the tokens of other engines, without tokens of its own."""
        x = torch.empty(0, self.row_size, dtype=self.dtype, device=self.device)
        experts = torch.empty(0, self.k, dtype=torch.int64, device=self.device)
        self.partials(x, experts, x.new_empty(experts.shape))

    def mix(self, x: Tensor, experts: Tensor, weights: Tensor) -> list[Tensor]:
        """Return the weighted sums of each token's products, one for each part. experts: numbers among the experts of
        this rank."""
        if self.kernels:
            return [
                ops.mix_packed(
                    x, part.gate_up, part.down, self.activation, experts, weights, part.biases, self.addends_of(i)
                )
                for i, part in enumerate(self.kernels)
            ]
        if self.kept is not None:
            mix, gate_up_packed, down_packed = self.kept
            return [mix(x, gate_up_packed, down_packed, self.activation, experts, weights, self.biases)]
        assert self.gate_up is not None and self.down is not None, "weights were loaded, but not packed"
        return [self.op(x, self.gate_up, self.down, self.activation, experts, weights, self.biases)]

    def pair_rows(self, part: int, x: Tensor, experts: Tensor) -> Tensor:
        """Return a part of the product of each token's experts, [tokens, k, hidden]; 0 where another rank has the
        expert. experts: as for `mix`."""
        weights = self.kernels[part]
        return ops.pair_rows(
            x, weights.gate_up, weights.down, self.activation, experts, weights.biases, self.addends_of(part)
        )

    def combine_rows(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's rows [tokens, k, hidden], with the bits of `mix`. experts: numbers
        among all experts."""
        packed = all(isinstance(weight, Tensor) for weight in (self.kernels[0].gate_up, self.kernels[0].down))
        return ops.combine_rows(rows, experts, weights, packed)

    def addends_of(self, part: int) -> list[ops.AddToPairs]:
        """Return what is added to a part of `gate_up` and of `down`; empty if nothing is."""
        return [partial(one.add, part=part) for one in self.addends]

    def shards(self) -> Shards:
        shards: Shards = {}
        own = self.split.own
        for i, merged in zip(own, self.stored, strict=False):
            for stored in merged:
                shards |= {f"{i}.{name}": shard for name, shard in stored.shards.items()}
        if self.gate_up is not None and self.down is not None:
            targets = (*self.gate_up.data.chunk(len(self.weights) - 1, dim=1), self.down.data)
            for (name, weight), target in zip(self.weights.items(), targets, strict=True):
                if self.stacked:
                    shards[name.replace(".", ":")] = weight.stacked(self.num_experts, own), target
                else:
                    shards |= {f"{i}.{name}.weight": (weight, expert) for i, expert in zip(own, target, strict=True)}
        return shards

    def elsewhere(self, names: set[str], name_of: Callable[[str], str]) -> set[str]:
        """Return the tensors of other ranks' experts, and learn whether the experts are stored as one tensor."""
        self.stacked |= name_of("down_proj") in names
        if not self.split.spread:
            return set()
        prefix = name_of("0.down_proj.weight").rpartition(".0.")[0] + "."
        experts = {name: name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
        return {name for name, expert in experts.items() if expert.isdigit() and int(expert) not in self.split.own}

    def pack(self) -> None:
        if self.tp.fixed_order:
            self.kernels = self.pieces()
            self.gate_up = self.down = None
            return
        projections = self.quantized()
        if not projections:
            return self.pack_each()
        if self.device.type == "cpu" and not dispatch.gpu_kernels(self.dtype, self.device):
            gate_up, down = ([self.product(weight) for weight in weights] for weights in projections)
            self.kernels = [ExpertWeights(gate_up, down, self.biases)]
        else:
            self.keep(*(ops.pack_experts(weights, len(self.split.own), self.dtype) for weights in projections))
        self.gate_up = self.down = None
        self.stored = []

    def keep(self, gate_up: ops.Packed, down: ops.Packed) -> None:
        """Keep the packed weights of quantized experts."""
        op = ops.select_packed((gate_up, down), self.dtype, self.device, self.split.spread)
        self.kept = op or self.op, gate_up, down

    def pack_each(self) -> None:
        """Pack the weights of each expert like those of a linear layer, if they are on a CPU."""
        if self.device.type == "cpu":
            assert self.gate_up is not None and self.down is not None
            gate_up = ops.pack_each(self.gate_up.data)
            self.gate_up = None  # freed before `down` is copied
            self.kernels = [ExpertWeights(gate_up, ops.pack_each(self.down.data), self.biases)]
            self.down = None

    def pieces(self) -> list[ExpertWeights]:
        """Cut this rank's experts into the parts whose products are summed in a fixed order (fixed_order.py)."""
        assert self.down is not None, "quantized weights cannot be cut"
        down = self.down.chunk(self.split.slices.parts, dim=2)
        return [
            ExpertWeights(ops.pack_each(rows), ops.pack_each(columns), biases)
            for rows, columns, biases in zip(self.gate_up_pieces(), down, self.bias_pieces(), strict=True)
        ]

    def gate_up_pieces(self) -> list[Tensor]:
        assert self.gate_up is not None, "quantized weights cannot be cut"
        return [
            part.flatten(1, 2)
            for part in self.gate_up.unflatten(1, (len(self.weights) - 1, -1)).chunk(self.split.slices.parts, dim=2)
        ]

    def bias_pieces(self) -> Sequence[ops.Biases]:
        return [None] * self.split.slices.parts

    def quantized(self) -> list[Iterator[QuantizedWeight]]:
        """Return iterators over the experts' `gate_up` and `down` weights, each weight decoded when it is reached.
        Empty if the weights are not quantized."""
        if self.stored:
            return [(weight.decode() for weight in weights) for weights in zip(*self.stored, strict=True)]
        if self.online is None or self.gate_up is None or self.down is None:
            return []
        return [map(self.online.quantize, self.gate_up.data), map(self.online.quantize, self.down.data)]

    def product(self, weight: QuantizedWeight) -> ops.Weight:
        return quantized_linear.select(weight, self.dtype) or linear.pack(weight.dequantize(self.dtype))


class MixtureOfExperts(nn.Module):
    """A sparse layer: [tokens, hidden] -> [tokens, hidden]. As in Qwen 3, arXiv:2505.09388. It may have an expert
    shared by all tokens (DeepSeekMoE, arXiv:2401.06066), which may have a gate (Qwen 2 MoE)."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, prefix: str = ""):
        super().__init__()
        moe = cfg.moe
        assert moe is not None
        self.tp = tp
        self.gate = ROUTERS[moe.scoring](cfg.hidden_size, moe)
        self.experts = self.make_experts(cfg, prefix)
        self.shared_expert = self.shared_expert_gate = None
        if moe.shared_intermediate_size:
            self.shared_expert = GatedMLP(cfg, tp, f"{prefix}.{moe.shared_name}", moe.shared_intermediate_size)
        if moe.shared_gate:
            self.shared_expert_gate = PaddedLinear(cfg.hidden_size, {"": Shard((1,), 0, 0, 1)})
        self.add_shared = ops.select_add_shared(self.experts.dtype, self.experts.device)

    def make_experts(self, cfg: ModelConfig, prefix: str) -> Experts:
        assert cfg.moe is not None
        projections = ("gate_proj", "up_proj", "down_proj")
        names = [f"experts.{i}.{projection}" for i in range(cfg.moe.num_experts) for projection in projections]
        return Experts(cfg.hidden_size, cfg.moe, cfg.activation, self.tp, cfg.weight_format(prefix, *names))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.experts.partials(x, *self.gate(x))
        if self.shared_expert is None:
            return self.tp.ranks.sum(parts)
        gate = None if self.shared_expert_gate is None else self.shared_expert_gate(x)
        shared = self.shared_expert.partials(x)
        if self.experts.split.scatters_sums():
            both = self.tp.ranks.sum([torch.cat(each) for each in zip(parts, shared, strict=True)])
            routed, more = both.chunk(2)
            return self.add_shared(routed, more, gate)
        return self.tp.ranks.sum(
            [self.add_shared(mixed, more, gate) for mixed, more in zip(parts, shared, strict=True)]
        )
