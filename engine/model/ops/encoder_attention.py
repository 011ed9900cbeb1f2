"""Attention over whole sequences without a KV cache, in which tokens see each other in both directions.

encoder_attention(q, k, v, batch, scale, window) -> [tokens, heads, head_dim]; `encoder_attention_plain` is the oracle.
    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], each head's values contiguous; query head h reads
    KV head h // (heads / kv_heads).
    A token sees all tokens of its sequence, or, with a window w, the tokens less than w positions away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops import dispatch
from engine.model.ops.rope import rotate_plain

EncoderAttentionOp = Callable[[Tensor, Tensor, Tensor, Batch, float, int | None], Tensor]


def select(dtype: torch.dtype, device: torch.device) -> EncoderAttentionOp:
    """Return the fastest version of `encoder_attention`."""
    if dispatch.cpu_kernels(dtype, device):
        from engine.model.ops.cpu.encoder_attention import encoder_attention

        return encoder_attention
    return encoder_attention_plain


def encoder_attention_plain(q: Tensor, k: Tensor, v: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
    """Attend: q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] -> [tokens, heads, head_dim]. Adjacent
    sequences of equal length are computed by one call of torch: [sequences, heads, length, head_dim]."""
    groups = q.shape[1] // k.shape[1]
    out: Tensor | None = None
    for first, count, length in equal_lengths(batch):
        rows = slice(first, first + count * length)
        queries, keys, values = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
        mask = None if window is None or window >= length else band(length, window, q.device)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=groups > 1
        )
        attended = attended.transpose(1, 2).flatten(0, 1)
        if count * length == len(q):
            return attended
        if out is None:
            out = v.repeat_interleave(groups, dim=1)  # the result for sequences of one token
        out[rows] = attended
    return v.repeat_interleave(groups, dim=1) if out is None else out


def select_rotation(dtype: torch.dtype, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the fastest version of `rotate` (see rope.py)."""
    if dispatch.cpu_kernels(dtype, device):
        from engine.model.ops.cpu.rope import rotate

        return rotate
    return rotate_plain


def equal_lengths(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """Yield (first row, number of sequences, tokens of each) for every run of adjacent sequences of equal length."""
    first = count = length = 0
    for chunk in batch.chunks:
        if chunk.count == length and chunk.first_row == first + count * length:
            count += 1
            continue
        if count:
            yield first, count, length
        first, count, length = chunk.first_row, 1, chunk.count
    if count:
        yield first, count, length


def band(length: int, window: int, device: torch.device) -> Tensor:
    """Return [length, length] bool: True where two positions are less than `window` apart."""
    position = torch.arange(length, device=device)
    return (position[:, None] - position).abs() < window
