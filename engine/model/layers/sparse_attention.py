"""DeepSeek Sparse Attention: latent attention to the tokens that an indexer selects. DeepSeek V3.2, arXiv:2512.02556,
section 2.1. In GLM 5, some layers reuse the selection of the layer before (arXiv:2603.12201).

A token's key for the indexer is cached right after its latent, so a token still has only one vector in the cache. A
row's selection does not depend on other rows, so a token has the same bits in any batch and chunk. As in transformers,
the indexer's queries and keys are not rounded to FP8. They are not rotated by a Hadamard matrix either, since that
would not change their products.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.latent_attention import NORM_EPS, LatentAttention, projection, rotate
from engine.model.layers.layer_norm import LayerNorm
from engine.model.layers.linear import ReplicatedLinear
from engine.model.ops.sparse import sparse_attention
from engine.model.shard import Shard, ShardPlan


class Indexer(nn.Module):
    """Scores the tokens that each row sees. Every rank computes all scores, so all ranks select the same tokens."""

    def __init__(self, cfg: ModelConfig, layer: int, table: Tensor):
        super().__init__()
        latent, prefix = cfg.latent, f"layers.{layer}.self_attn.indexer"
        assert latent is not None and latent.index is not None and latent.q_rank is not None
        self.cfg, self.rope_dim, self.table = latent.index, latent.rope_dim, table
        size = self.cfg.heads * self.cfg.dim
        self.wq_b = projection(cfg, latent.q_rank, Shard((size,), 0, 0, size), f"{prefix}.wq_b")
        self.wk = projection(cfg, cfg.hidden_size, Shard((self.cfg.dim,), 0, 0, self.cfg.dim), f"{prefix}.wk")
        self.k_norm = LayerNorm(self.cfg.dim, NORM_EPS)
        self.weights_proj = ReplicatedLinear(cfg.hidden_size, self.cfg.heads, bias=False)
        self.ops = sparse_attention.select(self.wk.dtype, self.wk.device)

    def keys(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the keys of this step's tokens: [tokens, hidden] -> [tokens, dim]."""
        return self.rotated(self.k_norm(self.wk(x))[:, None], batch)[:, 0]

    def select(self, x: Tensor, latents: Tensor, keys: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the places in the cache of the tokens that each row selects, and the number of these tokens. latents:
        [tokens, q_rank]; keys: [vectors, dim], the keys of all cached tokens, a view of the cache."""
        if "visible" not in batch.plans:  # by the first layer, for all
            batch.plans["visible"], batch.plans["lengths"] = sparse_attention.row_places(batch)
        places, lengths = batch.plans["visible"], batch.plans["lengths"]
        if places.shape[1] <= self.cfg.topk:
            return places, lengths
        q = self.rotated(self.wq_b(latents).unflatten(-1, (self.cfg.heads, -1)), batch)
        weights = self.weights_proj(x).float() * (self.cfg.heads * self.cfg.dim) ** -0.5
        scores = self.ops.index_scores(q.contiguous(), weights, keys, places, lengths)
        return sparse_attention.select_tokens(scores, places, lengths, self.cfg.topk)

    def rotated(self, x: Tensor, batch: Batch) -> Tensor:
        """Rotate the first values of each head of x [tokens, heads, dim] by positions."""
        first = rotate(x[..., : self.rope_dim], self.table, batch, self.cfg.interleaved)
        return torch.cat((first, x[..., self.rope_dim :]), dim=-1)


class SparseLatentAttention(LatentAttention):
    """Latent attention to the tokens that an indexer selects: [tokens, hidden] -> [tokens, hidden]."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__(cfg, tp, layer)
        assert self.cfg.index is not None
        self.index_dim = self.cfg.index.dim
        self.indexer = Indexer(cfg, layer, self.table) if layer in self.cfg.index.layers else None
        self.ops = sparse_attention.select(self.kv_b_proj.dtype, self.kv_b_proj.device)

    def attended(self, q: Tensor, c: Tensor, k: Tensor, x: Tensor, latents: Tensor, batch: Batch) -> Tensor:
        q, vectors = self.rotated(q, c, k, batch)
        keys = vectors.new_zeros(len(x), self.index_dim) if self.indexer is None else self.indexer.keys(x, batch)
        self.write(torch.cat((vectors, keys), dim=-1), batch, self.layer)
        cached = sparse_attention.vectors_of(batch.kv_cache, self.layer)
        vectors, keys = cached[:, : q.shape[-1]], cached[:, q.shape[-1] :]
        if self.indexer is not None:
            batch.plans["places"], batch.plans["counts"] = self.indexer.select(x, latents, keys, batch)
        places, counts = batch.plans["places"], batch.plans["counts"]
        return self.ops.attend_selected(q, vectors, places, counts, self.scale, self.cfg.rank)
