"""Attention of one layer over the paged KV cache, with rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.rope import rope_table
from engine.model.ops import attention, norm


class Attention(nn.Module):
    """Attention of one layer: q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] ->
    [tokens, heads * head_dim].

    norms: norms of q's and k's heads, applied before rotation, possibly in place. K and V of this step are written to
    the cache first, so a token also sees itself and the tokens before it in the same step.
    """

    def __init__(self, cfg: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.group, self.layer = cfg.kv_place(layer)
        self.scale = cfg.attention_scale
        self.window = cfg.window[layer]
        self.causal = False
        """Whether even the tokens of an image see only earlier tokens; set by families."""
        self.softcap = cfg.attn_logit_softcapping
        self.sinks: Tensor | None = None
        """[heads], set by layers with attention sinks."""
        self.table = rope_table(cfg.rope[layer], cfg.head_dim, cfg.max_position_embeddings, dtype, device)
        self.ops = attention.select(dtype, device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, norms: norm.HeadNorms | None = None) -> Tensor:
        table = self.table if batch.rope_table is None else batch.rope_table
        batch = batch.of_group(self.group, self.causal)
        return self.attended(self.ops.rotate_and_write(q, k, v, table, batch, self.layer, norms), batch)

    def attended(self, q: Tensor, batch: Batch) -> Tensor:
        """Attend with a rotated q [tokens, heads, head_dim]; return [tokens, heads * head_dim]. batch: contains the KV
        cache of this layer's group."""
        attended = self.ops.paged_attention(
            q, batch, self.layer, self.scale, self.window, softcap=self.softcap, sinks=self.sinks
        )
        return attended.flatten(1)
