"""Attention of one layer over whole sequences, with rotary positions and without a KV cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.rope import rope_table
from engine.model.ops import encoder_attention, norm


class EncoderAttention(nn.Module):
    """Attention in which tokens see each other in both directions: q [tokens, heads, head_dim], k and v
    [tokens, kv_heads, head_dim] -> [tokens, heads * head_dim]. Every step has whole sequences.

    norms: norms of q's and k's heads, applied before rotation.
    """

    def __init__(self, cfg: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.scale, self.window = cfg.attention_scale, cfg.window[layer]
        self.table = rope_table(cfg.rope[layer], cfg.head_dim, cfg.max_position_embeddings, dtype, device)
        self.rms_norm, _ = norm.select(dtype, device)
        self.rotate = encoder_attention.select_rotation(dtype, device)
        self.encoder_attention = encoder_attention.select(dtype, device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, norms: norm.HeadNorms | None = None) -> Tensor:
        if norms is not None:
            q, k = norms.apply(self.rms_norm, q, k)
        q, k = (self.rotate(x, self.table, batch.positions) for x in (q, k))
        return self.encoder_attention(q, k, v, batch, self.scale, self.window).flatten(1)
