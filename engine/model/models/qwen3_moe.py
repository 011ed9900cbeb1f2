"""Qwen 3 MoE, arXiv:2505.09388: Qwen 3 with experts in place of the MLP, in most layers or all."""

from __future__ import annotations

from torch import nn

from engine.distributed.tp_group import TPGroup
from engine.model.config import ModelConfig
from engine.model.layers.moe import MixtureOfExperts
from engine.model.models.qwen3 import Qwen3ForCausalLM, Qwen3Layer


class Qwen3MoeLayer(Qwen3Layer):
    def make_mlp(self, cfg: ModelConfig, tp: TPGroup, layer: int) -> nn.Module:
        if cfg.moe is not None and layer in cfg.moe.layers:
            return MixtureOfExperts(cfg, cfg.moe, tp, f"layers.{layer}.mlp")
        return super().make_mlp(cfg, tp, layer)


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    layer_type = Qwen3MoeLayer
