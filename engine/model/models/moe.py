"""Llama and Qwen 3 with a mixture of experts in most layers or all: Mixtral, Qwen 2 MoE and Qwen 3 MoE."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from engine.model.config import ModelConfig
from engine.model.layers.moe import MixtureOfExperts
from engine.model.models.llama import LlamaForCausalLM, LlamaLayer
from engine.model.models.qwen3 import Qwen3Attention
from engine.model.shard import ShardPlan


class MoELayer(LlamaLayer):
    """A layer of Llama with experts in place of its MLP, in the layers that the configuration names."""

    moe_type: ClassVar[type[MixtureOfExperts]] = MixtureOfExperts

    def make_mlp(self, cfg: ModelConfig, tp: ShardPlan, layer: int) -> nn.Module:
        if cfg.moe is not None and layer in cfg.moe.layers:
            return self.moe_type(cfg, tp, f"layers.{layer}.{self.mlp_name}")
        return super().make_mlp(cfg, tp, layer)


class Qwen3MoeLayer(MoELayer):
    attention_type = Qwen3Attention


class LlamaMoeForCausalLM(LlamaForCausalLM):
    layer_type = MoELayer


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    layer_type = Qwen3MoeLayer
