"""Attention of each row to tokens of its own choice: DeepSeek Sparse Attention, arXiv:2512.02556, section 2.1.

An indexer scores the tokens that a row sees, by small keys that are cached behind the latents; latent attention then
reads the best `topk` tokens. `places` gives the position of each token's vector in the cache, counted in vectors from
the first vector of a layer, so it is the same for all layers. This file has the plain versions, which also run on a
GPU. A CPU has kernels for scores and attention.

index_scores(q, weights, keys, places, lengths) -> [rows, max_len] float32
    q: [rows, heads, dim]; weights: [rows, heads] float32; keys: [vectors, dim], a view; places: [rows, max_len] int32;
    lengths: [rows] int32, the tokens that each row sees. A score is the sum over heads of weight * relu(q @ key); the
    scores of tokens that a row does not see are undefined.
attend_selected(q, vectors, places, counts, scale, rank) -> [rows, heads, rank]
    q: [rows, heads, width]; vectors: [vectors, width], a view, whose first `rank` values are the value; counts: [rows]
    int32. Row i sees its first counts[i] places; a row that sees none gets 0.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops import dispatch

SLICE = 64  # rows whose vectors are gathered at a time


def select(dtype: torch.dtype, device: torch.device) -> ModuleType:
    """Return the module with the fastest versions of both ops."""
    if dispatch.cpu_kernels(dtype, device):
        from engine.model.ops.cpu.sparse import sparse_attention

        return sparse_attention
    return sys.modules[__name__]


def vectors_of(cache: Tensor, layer: int) -> Tensor:
    """Return a layer's vectors [vectors, head_dim] as a view of the cache [num_blocks, layers, 1, 1, block_size,
    head_dim]. Places are indices of this view."""
    return cache.view(-1, cache.shape[5])[layer * cache.shape[4] :]


def row_places(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the places of the tokens that each row sees, [rows, max_len] int32, and their number, lengths [rows]
    int32."""
    lengths = torch.where(batch.slot_mapping >= 0, batch.positions + 1, 0).int()
    max_len, size, step = int(lengths.max()), batch.kv_cache.shape[4], batch.kv_cache[0].numel()
    rows = torch.arange(len(lengths), device=lengths.device, dtype=torch.int32)
    seqs = torch.searchsorted(batch.query_start[1:], rows, right=True).clamp(max=len(batch.kv_len) - 1)
    token = torch.arange(max_len, device=lengths.device)
    places = batch.block_table[:, token // size] * (step // batch.kv_cache.shape[5]) + token % size
    return places.int()[seqs], lengths


def select_tokens(scores: Tensor, places: Tensor, lengths: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return the places of each row's `topk` best tokens, in token order [rows, topk], and their number [rows] int32.
    Of tokens with equal scores, the earlier is better."""
    seen = torch.arange(scores.shape[1], device=scores.device) < lengths[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    least = scores.topk(topk, dim=-1).values[:, -1:]
    better, equal = scores > least, (scores == least) & seen
    wanted = topk - better.sum(-1, keepdim=True)
    rows, tokens = (better | (equal & (equal.cumsum(-1) <= wanted))).nonzero(as_tuple=True)
    counts = rows.bincount(minlength=len(scores))
    selected = places.new_zeros(len(scores), topk)
    selected[rows, torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]] = places[
        rows, tokens
    ]
    return selected, counts.int()


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
    parts = []
    for part in torch.arange(len(q), device=q.device).split(SLICE):
        found = (keys[places[part]].float() @ q[part].float().mT).relu()  # [rows, max_len, heads]
        parts.append((found @ weights[part, :, None]).squeeze(-1))
    return torch.cat(parts)


def attend_selected(q: Tensor, vectors: Tensor, places: Tensor, counts: Tensor, scale: float, rank: int) -> Tensor:
    parts, column = [], torch.arange(places.shape[1], device=places.device)
    for part in torch.arange(len(q), device=q.device).split(SLICE):
        seen = column < counts[part, None]
        # [rows, selected, width]; what is in other places may not be finite
        keys = vectors[places[part]].float().masked_fill(~seen[:, :, None], 0.0)
        scores = (q[part].float() @ keys.mT * scale).masked_fill(~seen[:, None], -torch.inf)
        weights = scores.softmax(-1).masked_fill(~seen[:, None], 0.0)
        parts.append((weights @ keys[..., :rank]).to(q.dtype))
    return torch.cat(parts)
