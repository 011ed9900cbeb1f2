"""Mixture of experts in place of an MLP. Every rank holds a slice of every expert, so ranks have equal work whatever
the router picks, and one all-reduce ends the layer as in an ordinary MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.linear import Part
from engine.layers.shard import Shard, Sharded, replicated
from engine.model_config import ModelConfig, MoEConfig
from engine.ops import activation as activations
from engine.ops.moe import mix_experts
from engine.tp_group import TPGroup


class Router(Sharded):
    """x [tokens, hidden] -> the experts of each token [tokens, k] int64, and their weights [tokens, k] in x's dtype."""

    def __init__(self, hidden_size: int, moe: MoEConfig):
        super().__init__()
        self.k, self.normalise = moe.experts_per_token, moe.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = F.linear(x, self.weight).softmax(dim=-1, dtype=torch.float32).topk(self.k, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return experts, weights.to(x.dtype)

    def shards(self) -> dict[str, Shard]:
        return {"weight": replicated(self.weight)}


class Experts(Sharded):
    """This rank's slice of every expert's gated MLP.

    gate_up: [experts, 2 * slice, hidden], down: [experts, hidden, slice]
    """

    def __init__(self, hidden_size: int, moe: MoEConfig, activation: str, tp: TPGroup):
        super().__init__()
        self.tp = tp
        self.part = Part.of_rank(moe.intermediate_size, tp, "moe_intermediate_size")
        self.activation = activations.choose(activation)
        self.gate_up = nn.Parameter(torch.empty(moe.num_experts, 2 * self.part.size, hidden_size), requires_grad=False)
        self.down = nn.Parameter(torch.empty(moe.num_experts, hidden_size, self.part.size), requires_grad=False)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return self.tp.all_reduce(mix_experts(x, self.gate_up, self.down, self.activation, experts, weights))

    def shards(self) -> dict[str, Shard]:
        total, start = self.part.total, self.part.start
        hidden = self.down.shape[1]
        shards = {}
        for i, (gate_up, down) in enumerate(zip(self.gate_up.data, self.down.data, strict=True)):
            gate, up = gate_up.chunk(2)
            shards[f"{i}.gate_up_proj.gate.weight"] = Shard(gate, (total, hidden), start=start)
            shards[f"{i}.gate_up_proj.up.weight"] = Shard(up, (total, hidden), start=start)
            shards[f"{i}.down_proj.weight"] = Shard(down, (hidden, total), dim=1, start=start)
        return shards


class MixtureOfExperts(nn.Module):
    """[tokens, hidden] -> [tokens, hidden]. Sparse layers as in Qwen 3, arXiv:2505.09388: no shared expert."""

    def __init__(self, cfg: ModelConfig, moe: MoEConfig, tp: TPGroup):
        super().__init__()
        self.gate = Router(cfg.hidden_size, moe)
        self.experts = Experts(cfg.hidden_size, moe, cfg.activation, tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x))
