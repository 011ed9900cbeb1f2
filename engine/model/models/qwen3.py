"""Qwen 3, arXiv:2505.09388: Llama with RMSNorm on every head's query and key."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.norm import RMSNorm
from engine.model.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer
from engine.model.shard import ShardPlan


class Qwen3Attention(LlamaAttention):
    norm_type: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__(cfg, tp, layer)
        self.q_norm = self.norm_type(cfg.head_dim, cfg.rms_norm_eps)
        self.k_norm = self.norm_type(cfg.head_dim, cfg.rms_norm_eps)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv_proj(x)
        return self.o_proj(self.attend(q, k, v, batch, self.q_norm.of_heads(self.k_norm)))


class Qwen3Layer(LlamaLayer):
    attention_type = Qwen3Attention


class Qwen3ForCausalLM(LlamaForCausalLM):
    layer_type = Qwen3Layer
