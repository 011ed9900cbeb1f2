"""Attention over the paged KV cache: the contract of every version of the two ops. `attention_plain` is the reference
with which tests compare.

rotate_and_write(q, k, v, table, batch, layer, norms) -> q rotated, possibly q itself
    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]; each token's values contiguous
    norms: norms to apply to the heads of q and k first (see norm.py); None for none.
    q and k are rotated by `batch.positions` (see rope.py); k and v are written to the cache at `batch.slot_mapping`.
    The memory of q and k may be overwritten.

paged_attention(q, batch, layer, scale, window, *, softcap, sinks, chunk) -> [tokens, heads, head_dim]
    q: [tokens, heads, head_dim]; query head h reads KV head h // (heads / kv_heads).
    In a sequence with kv_len L and Q query rows, row i is at position L - Q + i. It sees the positions up to its own,
    whose K and V must have been written: with a window w only the last w of them, with a chunk c only those from the
    last multiple of c on. With `batch.image_ends` it also sees later positions, up to its image's end.
    A score s is q @ k times `scale`, or with a softcap, softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118).
    sinks: [heads] of q's dtype, one more score per head, whose key has no value: it only takes weight from the others
    (gpt-oss, arXiv:2508.10925).

Tokens with slot -1, sequences with kv_len 0, and -1 in `batch.single` are padding: nothing is written or read for them.
Output rows of a padding sequence are 0; rows that belong to no sequence are undefined.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from engine.model.kv_groups import KVCacheSpec
from engine.model.ops import attention_plain, dispatch
from engine.model.ops.attention_plain import LatentAttention, WriteLatent


def select(dtype: torch.dtype, device: torch.device) -> ModuleType:
    """Return the module with the fastest versions of both ops."""
    if dispatch.cpu_kernels(dtype, device):
        from engine.model.ops.cpu import attention

        return attention
    if dispatch.gpu_kernels(dtype, device):
        from engine.model.ops.gpu.libraries import attention as libraries

        return libraries
    return attention_plain


def select_latent(dtype: torch.dtype, device: torch.device) -> tuple[WriteLatent, LatentAttention]:
    """Return the fastest versions of write_latent(latent, batch, layer) and latent_attention(q, batch, layer, scale,
    rank) -> [tokens, heads, rank].

    `latent_attention` is `paged_attention` over one vector per token for all heads: the vector is the key, and its
    first `rank` values are the value (arXiv:2405.04434). `write_latent` writes these vectors [tokens, head_dim] to K of
    the cache, at `batch.slot_mapping`; V is absent or unused. q: [tokens, heads, head_dim].
    """
    if dispatch.cpu_kernels(dtype, device):
        from engine.model.ops.cpu import attention

        return attention_plain.write_latent, attention.latent_attention
    if dispatch.gpu_kernels(dtype, device):
        from engine.model.ops.gpu import latent_attention, latent_rope

        return latent_rope.write_latent, latent_attention.latent_attention
    return attention_plain.write_latent, attention_plain.latent_attention


def select_rotate_and_write_latent(dtype: torch.dtype, device: torch.device) -> Callable[..., None] | None:
    """Return the kernel that norms latents, rotates queries and keys of latent attention, and writes the cache; None if
    there is none. See ops/gpu/latent_rope.py."""
    if dispatch.cpu_kernels(dtype, device):
        from engine.model.ops.cpu import rope

        return rope.rotate_and_write_latent
    if dispatch.gpu_kernels(dtype, device):
        from engine.model.ops.gpu import latent_rope

        return latent_rope.rotate_and_write_latent
    return None


def tile_rows(longest: int, heads: int, spec: KVCacheSpec, dtype: torch.dtype, device: torch.device) -> int:
    """Return the most rows that a tile of `Batch.tiles` can have in layers with KV of this `spec`, for chunks of up to
    `longest` rows."""
    if not dispatch.gpu_kernels(dtype, device):
        return longest  # tiles are not used
    from engine.model.ops.gpu import attention, latent_attention

    if spec.parts == 1:
        return latent_attention.CHUNK_ROWS
    return attention.tile_rows(longest, heads, spec.num_kv_heads, spec.head_dim, dtype, device)
