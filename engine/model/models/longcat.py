"""LongCat Flash, arXiv:2509.01322: each layer of its checkpoint is two of ours, with latent attention and a dense MLP
each. Experts read what the first MLP reads, and are added after the second. Some experts return their input."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.config_parts.moe import MoEConfig
from engine.model.layers.latent_attention import NORM_EPS, LatentAttention
from engine.model.layers.moe import Experts, RouterProduct
from engine.model.layers.norm import RMSNorm
from engine.model.models.llama import PACKED, LlamaForCausalLM, LlamaLayer
from engine.model.ops import moe as ops
from engine.model.shard import ShardPlan, Shards, replicated

OF_LAYER = re.compile(r"layers\.(\d+)\.(\w+)\.(.*)")
NAMES = {"mlp": "mlps", "moe": "mlp"}
"""Modules of a layer with other names in the checkpoint."""


class FactorNorm(RMSNorm):
    """RMSNorm whose output is multiplied by a factor."""

    def __init__(self, size: int, eps: float, factor: float):
        super().__init__(size, eps)
        self.factor = factor

    def pack(self) -> None:
        self.weight.data *= self.factor


class LongcatAttention(LatentAttention):
    """Latent attention whose latents are as large as hidden states after their norms."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__(cfg, tp, layer)
        queries, keys = cfg.latent.q_rank, cfg.latent.rank
        self.q_a_layernorm = FactorNorm(queries, NORM_EPS, (cfg.hidden_size / queries) ** 0.5)
        self.kv_a_layernorm = FactorNorm(keys, NORM_EPS, (cfg.hidden_size / keys) ** 0.5)


class LongcatRouter(RouterProduct):
    """A softmax over all experts in float32. Experts are chosen by probability plus a correction: x [tokens, hidden] ->
    experts [tokens, k] int64, weights [tokens, k]."""

    weight_name = "classifier"

    def __init__(self, hidden_size: int, moe: MoEConfig):
        super().__init__(hidden_size, replace(moe, num_experts=moe.num_experts + moe.zero_experts))
        self.correction = nn.Parameter(torch.empty(self.moe.num_experts, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.logits(x).softmax(-1)
        experts = (scores + self.correction).topk(self.moe.experts_per_token, dim=-1).indices
        return experts, (scores.gather(1, experts) * self.moe.routed_scaling_factor).to(x.dtype)

    def shards(self) -> Shards:
        return super().shards() | {"e_score_correction_bias": replicated(self.correction)}


class LongcatExperts(Experts):
    """Experts of which a token may choose fewer than k: others have the number `num_experts`."""

    takes_addends = False  # PEFT's adapters of all experts have parts for those that return their input

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, prefix: str):
        moe = cfg.moe
        names = [f"experts.{i}.{p}" for i in range(moe.num_experts) for p in ("gate_proj", "up_proj", "down_proj")]
        super().__init__(cfg.hidden_size, moe, cfg.activation, tp, cfg.weight_format(prefix, *names))
        size = self.weights["down_proj"].size
        self.op = ops.select(cfg.hidden_size, size, self.dtype, self.device, some=True)

    def keep(self, gate_up: ops.Packed, down: ops.Packed) -> None:
        op = ops.select_packed((gate_up, down), self.dtype, self.device, some=True)
        self.kept = op or self.op, gate_up, down


class LongcatMoE(nn.Module):
    """Experts, the last of which return their input: [tokens, hidden] -> [tokens, hidden]."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, prefix: str):
        super().__init__()
        self.num_experts = cfg.moe.num_experts
        self.gate = LongcatRouter(cfg.hidden_size, cfg.moe)
        self.experts = LongcatExperts(cfg, tp, prefix)

    def forward(self, x: Tensor) -> Tensor:
        experts, weights = self.gate(x)
        kept = weights.masked_fill(experts < self.num_experts, 0).sum(-1, keepdim=True)
        return self.experts(x, experts.clamp(max=self.num_experts), weights) + x * kept


class LongcatLayer(LlamaLayer):
    """Half of a layer: (x, residual, what the experts give) -> the same. The first half computes the experts, and the
    second adds them."""

    attention_type = LongcatAttention

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__(cfg, tp, layer)
        self.moe = LongcatMoE(cfg, tp, f"layers.{layer // 2}.mlp") if layer in cfg.moe.layers else None

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None, batch: Batch, added: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        residual, normed = self.input_layernorm.add(residual, x)
        residual, normed = self.post_attention_layernorm.add(residual, self.mix(normed, batch))
        if self.moe is not None:
            return self.mlp(normed), residual, self.moe(normed)
        assert added is not None
        return self.mlp(normed) + added, residual, None


class LongcatForCausalLM(LlamaForCausalLM):
    packed: ClassVar[dict[str, str]] = PACKED | {"mlp.gate": "mlp.router"}
    layer_type: ClassVar[type[nn.Module]] = LongcatLayer

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__(cfg, tp)
        zero = range(cfg.moe.num_experts, cfg.moe.num_experts + cfg.moe.zero_experts)
        layers = range(cfg.num_layers // 2)
        # transformers writes weights of experts that have none
        unused = (f"model.layers.{layer}.mlp.experts.{expert}." for layer in layers for expert in zero)
        self.unused = ("model.mtp.", *unused)

    def run_layers(self, x: Tensor, batch: Batch, inputs: Sequence[Tensor] = ()) -> Tensor:
        residual = added = None
        aux = []
        for i, layer in enumerate(self.layers):
            if i in self.aux_layers:
                aux.append(x if residual is None else residual + x)
            x, residual, added = layer(x, residual, batch, added)
        hidden = self.norm.add(residual, x)[1]
        return torch.cat((hidden, *aux), dim=-1) if aux else hidden

    def checkpoint_name(self, path: str) -> str:
        if found := OF_LAYER.fullmatch(path):
            (layer, half), name = divmod(int(found[1]), 2), NAMES.get(found[2], found[2])
            part = "" if found[2] == "moe" else f"{half}."
            path = f"layers.{layer}.{name}.{part}{found[3]}"
        return super().checkpoint_name(path)
