"""Gemma 3, text only, arXiv:2503.19786: scaled embeddings, norms before and after each block, norms of queries and
keys, and windowed layers with a rotary embedding of their own (the last is a matter of configuration)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.batch import Batch
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.model_config import ModelConfig
from engine.models.llama import LlamaAttention, LlamaForCausalLM
from engine.tp_group import TPGroup


class GemmaRMSNorm(RMSNorm):
    """Scales by 1 + weight."""

    shift = 1.0


class Gemma3Attention(LlamaAttention):
    def __init__(self, cfg: ModelConfig, tp: TPGroup, layer: int):
        super().__init__(cfg, tp, layer)
        self.q_norm = GemmaRMSNorm(cfg.head_dim, cfg.rms_norm_eps)
        self.k_norm = GemmaRMSNorm(cfg.head_dim, cfg.rms_norm_eps)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv_proj(x)
        return self.o_proj(self.attend(self.q_norm(q), self.k_norm(k), v, batch))


class Gemma3Layer(nn.Module):
    """Residual block with norms on both sides: [tokens, hidden] -> [tokens, hidden]."""

    def __init__(self, cfg: ModelConfig, tp: TPGroup, layer: int):
        super().__init__()
        self.input_layernorm = GemmaRMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = Gemma3Attention(cfg, tp, layer)
        self.post_attention_layernorm = GemmaRMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.pre_feedforward_layernorm = GemmaRMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = GatedMLP(cfg, tp, f"layers.{layer}.mlp")
        self.post_feedforward_layernorm = GemmaRMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        attended = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), batch))
        x, normed = self.pre_feedforward_layernorm.add(x, attended)
        return x + self.post_feedforward_layernorm(self.mlp(normed))


class Gemma3ForCausalLM(LlamaForCausalLM):
    layer_type = Gemma3Layer

    def __init__(self, cfg: ModelConfig, tp: TPGroup):
        super().__init__(cfg, tp)
        self.norm = GemmaRMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        # rounded to the model's dtype, as in training: sqrt(3072) is 55.5 in bfloat16
        self.embed_scale = torch.tensor(cfg.hidden_size**0.5, device="cpu").to(torch.get_default_dtype()).item()

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * self.embed_scale
