"""Gemma 3, text only, arXiv:2503.19786: scaled embeddings, norms before and after each block, norms of queries and
keys. Windows, and a second rotary embedding for layers with a window, come from the configuration."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.encoder_attention import EncoderAttention
from engine.model.layers.norm import RMSNorm
from engine.model.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer
from engine.model.models.qwen3 import Qwen3Attention
from engine.model.shard import ShardPlan


class GemmaRMSNorm(RMSNorm):
    """RMSNorm that scales by 1 + weight."""

    shift = 1.0


class Gemma3Attention(Qwen3Attention):
    norm_type = GemmaRMSNorm

    def make_attention(self, cfg: ModelConfig, layer: int) -> nn.Module:
        if cfg.bidirectional:  # EmbeddingGemma
            return EncoderAttention(cfg, layer, self.qkv_proj.dtype, self.qkv_proj.device)
        return super().make_attention(cfg, layer)


class Gemma3Layer(LlamaLayer):
    """A residual block with norms before and after attention and MLP."""

    attention_type: ClassVar[type[LlamaAttention]] = Gemma3Attention
    norm_type: ClassVar[type[RMSNorm]] = GemmaRMSNorm

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__(cfg, tp, layer)
        self.pre_feedforward_layernorm = self.norm_type(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_feedforward_layernorm = self.norm_type(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor | None]:
        residual, normed = self.input_layernorm.add(residual, x)
        attended = self.post_attention_layernorm(self.self_attn(normed, batch))
        residual, normed = self.pre_feedforward_layernorm.add(residual, attended)
        return self.post_feedforward_layernorm(self.mlp(normed)), residual


class Gemma3ForCausalLM(LlamaForCausalLM):
    layer_type: ClassVar[type[nn.Module]] = Gemma3Layer

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__(cfg, tp)
        self.norm = GemmaRMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        # rounded to the model's dtype, as in training: sqrt(3072) is 55.5 in bfloat16
        self.embed_scale = torch.tensor(cfg.hidden_size**0.5, device="cpu").to(self.embed_tokens.dtype).item()

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * self.embed_scale
