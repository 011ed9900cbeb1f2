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

from types import ModuleType

import torch

from engine.model.ops import attention_plain, dispatch


def select(dtype: torch.dtype, device: torch.device) -> ModuleType:
    """Return the module with the fastest versions of both ops."""
    return dispatch.module_of(dtype, device, cpu="attention", gpu="libraries.attention") or attention_plain
