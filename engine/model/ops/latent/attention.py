"""Latent attention over the paged KV cache, in plain torch, and the choice of its fast versions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops import dispatch
from engine.model.ops.attention import attend_by_scores, visible_keys

WriteLatent = Callable[[Tensor, Batch, int], None]
LatentAttention = Callable[[Tensor, Batch, int, float, int], Tensor]


def select(dtype: torch.dtype, device: torch.device) -> tuple[WriteLatent, LatentAttention]:
    """Return the fastest versions of write_latent(latent, batch, layer) and latent_attention(q, batch, layer, scale,
    rank) -> [tokens, heads, rank].

    `latent_attention` is `paged_attention` over one vector per token for all heads: the vector is the key, and its
    first `rank` values are the value (arXiv:2405.04434). `write_latent` writes these vectors [tokens, head_dim] to K of
    the cache, at `batch.slot_mapping`; V is absent or unused. q: [tokens, heads, head_dim].
    """
    fast = dispatch.module_of(dtype, device, cpu="attention", gpu="latent_attention")
    writes = dispatch.module_of(dtype, device, gpu="latent_rope")
    return (
        write_latent if writes is None else writes.write_latent,
        latent_attention if fast is None else fast.latent_attention,
    )


def select_rotate_and_write(dtype: torch.dtype, device: torch.device) -> Callable[..., None] | None:
    """Return the kernel that norms latents, rotates queries and keys of latent attention, and writes the cache; None if
    there is none. See ops/gpu/latent_rope.py."""
    fast = dispatch.module_of(dtype, device, cpu="rope", gpu="latent_rope")
    return None if fast is None else fast.rotate_and_write_latent


def write_latent(latent: Tensor, batch: Batch, layer: int) -> None:
    """Write latents to the cache. latent: [tokens, head_dim]."""
    real, size = batch.slot_mapping >= 0, batch.kv_cache.shape[4]
    slots = batch.slot_mapping[real]
    batch.kv_cache[slots // size, layer, 0, 0, slots % size] = latent[real]


def latent_attention(q: Tensor, batch: Batch, layer: int, scale: float, rank: int) -> Tensor:
    """Attend sequence by sequence: q [tokens, heads, head_dim] -> [tokens, heads, rank]. Reads part 0 of
    `batch.kv_cache` [num_blocks, layers, parts, 1, block_size, head_dim]."""
    out = q.new_zeros(*q.shape[:2], rank)
    starts, block_size = batch.query_start.tolist(), batch.kv_cache.shape[4]
    for seq, kv_len in enumerate(batch.kv_len.tolist()):
        if kv_len == 0:  # padding
            continue
        rows, blocks = slice(starts[seq], starts[seq + 1]), batch.block_table[seq, : -(-kv_len // block_size)]
        keys = batch.kv_cache[blocks, layer, 0, 0].flatten(0, 1)[None, :kv_len]
        visible = visible_keys(starts[seq + 1] - starts[seq], kv_len, None, None, q.device)
        attended = attend_by_scores(q[rows].transpose(0, 1), keys, keys[..., :rank], scale, visible, None, None)
        out[rows] = attended.transpose(0, 1)
    return out
