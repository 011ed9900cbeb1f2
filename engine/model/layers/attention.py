"""Attention of one layer, with rotary positions: over the paged KV cache, or over whole sequences without a cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.rope import rope_table
from engine.model.ops import attention, encoder_attention, norm, norm_plain


class Attention(nn.Module):
    """Attention of one layer: q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] ->
    [tokens, heads * head_dim].

    norms: norms of q's and k's heads, applied before rotation, possibly in place. K and V of this step are written to
    the cache first, so a token also sees itself and the tokens before it in the same step. A bidirectional model gets
    whole sequences in every step, and has no cache.
    """

    def __init__(self, cfg: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.group, self.layer = (0, layer) if cfg.bidirectional else cfg.kv_place(layer)
        self.scale = cfg.attention_scale
        self.window = cfg.window[layer]
        self.causal = cfg.vision is not None and cfg.vision.causal_without_window and self.window is None
        self.softcap = cfg.attn_logit_softcapping
        self.sinks: Tensor | None = None
        """[heads], set by layers with attention sinks."""
        self.table = rope_table(cfg.rope[layer], cfg.head_dim, cfg.max_position_embeddings, dtype, device)
        self.bidirectional = cfg.bidirectional
        self.rms_norm, _ = norm.select(dtype, device)
        self.rotate = encoder_attention.select_rotation(dtype, device)
        self.encoder_attention = encoder_attention.select(dtype, device)
        self.ops = attention.select(dtype, device)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, norms: norm_plain.HeadNorms | None = None
    ) -> Tensor:
        if self.bidirectional:
            if norms is not None:
                q, k = norms.apply(self.rms_norm, q, k)
            q, k = (self.rotate(x, self.table, batch.positions) for x in (q, k))
            return self.encoder_attention(q, k, v, batch, self.scale, self.window).flatten(1)
        table = self.table if batch.rope_table is None else batch.rope_table
        batch = batch.of_group(self.group, self.causal)
        return self.attended(self.ops.rotate_and_write(q, k, v, table, batch, self.layer, norms), batch)

    def read(self, q: Tensor, batch: Batch) -> Tensor:
        """Attend to the K and V that another layer has written. `kv_place` names that layer. q: normed, but not yet
        rotated."""
        return self.attended(self.rotate(q, self.table, batch.positions), batch.of_group(self.group, self.causal))

    def attended(self, q: Tensor, batch: Batch) -> Tensor:
        """Attend with a rotated q [tokens, heads, head_dim]; return [tokens, heads * head_dim]. batch: contains the KV
        cache of this layer's group."""
        attended = self.ops.paged_attention(
            q, batch, self.layer, self.scale, self.window, softcap=self.softcap, sinks=self.sinks
        )
        return attended.flatten(1)
