"""How many rows a tile of attention on a GPU has."""

from __future__ import annotations

import torch

from engine.model.kv_groups import KVCacheSpec
from engine.model.ops import dispatch


def tile_rows(longest: int, heads: int, spec: KVCacheSpec, dtype: torch.dtype, device: torch.device) -> int:
    """Return the most rows that a tile of `Batch.tiles` can have in layers with KV of this `spec`, for chunks of up to
    `longest` rows."""
    fast = dispatch.module_of(dtype, device, gpu="latent_attention" if spec.parts == 1 else "attention")
    if fast is None:
        return longest  # tiles are not used
    if spec.parts == 1:
        chunk_rows: int = fast.CHUNK_ROWS
        return chunk_rows
    rows: int = fast.tile_rows(longest, heads, spec.num_kv_heads, spec.head_dim, dtype, device)
    return rows
