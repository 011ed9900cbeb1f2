"""Attention over the paged KV cache. What every version of the two ops must do; `attention_plain` is the oracle.

write_kv(k, v, batch, layer)
    k, v: [tokens, kv_heads, head_dim], written to the cache at `batch.slot_mapping`.

paged_attention(q, batch, layer, scale, window) -> [tokens, heads, head_dim]
    q: [tokens, heads, head_dim]; query head h reads KV head h // (heads / kv_heads).
    A sequence with kv_len L and Q query rows has its row i at position L - Q + i, and the row sees the positions up to
    its own; with a window w only the last w of them. Its own K and V must have been written before.
"""

from __future__ import annotations

from types import ModuleType

from engine.ops import attention_plain, versions


def choose() -> ModuleType:
    """A module that has both ops."""
    if versions.cpu_kernels():
        from engine.ops.cpu import attention

        return attention
    return attention_plain
