"""Mixture of experts. Every rank holds a slice of every expert, so that ranks have equal work whatever the router
picks, and one all-reduce ends the layer as it does an ordinary MLP."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.distributed.tp_group import TPGroup
from engine.model.config import ModelConfig, MoEConfig
from engine.model.ops import activation as activations
from engine.model.ops import moe as ops
from engine.model.quantization.format import StoredWeight, WeightFormat
from engine.model.shard import INPUTS, OUTPUTS, Shard, Sharded, Shards, replicated

logger = logging.getLogger(__name__)


class Router(Sharded):
    """x [tokens, hidden] -> each token's experts [tokens, k] int64, and their weights [tokens, k] in x's dtype."""

    def __init__(self, hidden_size: int, moe: MoEConfig):
        super().__init__()
        self.k, self.normalise = moe.experts_per_token, moe.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = F.linear(x, self.weight).softmax(dim=-1, dtype=torch.float32).topk(self.k, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return experts, weights.to(x.dtype)

    def shards(self) -> Shards:
        return {"weight": replicated(self.weight)}


class Experts(Sharded):
    """This rank's slice of every expert's gated MLP.

    gate_up: [experts, 2 * slice, hidden], down: [experts, hidden, slice]

    format: how quantized weights are stored. `pack` dequantizes them, since there is no kernel for them yet.
    """

    def __init__(
        self, hidden_size: int, moe: MoEConfig, activation: str, tp: TPGroup, format: WeightFormat | None = None
    ):
        super().__init__()
        self.tp = tp
        rows = Shard.of_rank((moe.intermediate_size, hidden_size), OUTPUTS, tp, "moe_intermediate_size")
        columns = Shard.of_rank((hidden_size, moe.intermediate_size), INPUTS, tp, "moe_intermediate_size")
        self.weights = {"gate_up_proj.gate": rows, "gate_up_proj.up": rows, "down_proj": columns}
        self.activation = activations.select(activation, self.dtype, self.device)
        self.mix = ops.select(hidden_size, rows.size, self.dtype, self.device)
        self.stored: list[list[StoredWeight]] = []
        self.gate_up: nn.Parameter | None = None
        self.down: nn.Parameter | None = None
        if format is not None:
            merged = [{"gate_up_proj.gate": rows, "gate_up_proj.up": rows}, {"down_proj": columns}]
            self.stored = [[StoredWeight(group, format) for group in merged] for _ in range(moe.num_experts)]
            self.quantized_parameters = sum(weight.numel for weights in self.stored for weight in weights)
        else:
            self.gate_up = nn.Parameter(torch.empty(moe.num_experts, 2 * rows.size, hidden_size), requires_grad=False)
            self.down = nn.Parameter(torch.empty(moe.num_experts, hidden_size, rows.size), requires_grad=False)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        assert self.gate_up is not None and self.down is not None, "weights were loaded, but not packed"
        return self.tp.all_reduce(self.mix(x, self.gate_up, self.down, self.activation, experts, weights))

    def shards(self) -> Shards:
        shards: Shards = {}
        for i, merged in enumerate(self.stored):
            for stored in merged:
                shards |= {f"{i}.{name}": shard for name, shard in stored.shards.items()}
        if self.gate_up is not None and self.down is not None:
            for i, (gate_up, down) in enumerate(zip(self.gate_up.data, self.down.data, strict=True)):
                for (name, weight), target in zip(self.weights.items(), (*gate_up.chunk(2), down), strict=True):
                    shards[f"{i}.{name}.weight"] = weight, target
        return shards

    def pack(self) -> None:
        if self.stored:
            logger.info("quantized experts: dequantized to %s at load", str(self.dtype).removeprefix("torch."))
            self.gate_up, self.down = (
                nn.Parameter(torch.stack([w.decode().dequantize(self.dtype) for w in weights]), requires_grad=False)
                for weights in zip(*self.stored, strict=True)
            )
            self.stored = []


class MixtureOfExperts(nn.Module):
    """[tokens, hidden] -> [tokens, hidden]. Sparse layers as in Qwen 3, arXiv:2505.09388: no shared expert."""

    def __init__(self, cfg: ModelConfig, tp: TPGroup, prefix: str = ""):
        super().__init__()
        moe = cfg.moe
        assert moe is not None
        self.gate = Router(cfg.hidden_size, moe)
        projections = ("gate_proj", "up_proj", "down_proj")
        names = [f"experts.{i}.{projection}" for i in range(moe.num_experts) for projection in projections]
        self.experts = Experts(cfg.hidden_size, moe, cfg.activation, tp, cfg.weight_format(prefix, *names))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x))
