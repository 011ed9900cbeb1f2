"""Attention over the paged KV cache: the contract of every version of the two ops, and the plain ones, with which tests
compare the others. These gather the K and V of each sequence and attend densely.

rotate_and_write(q, k, v, table, batch, layer, norms) -> q rotated, possibly q itself
    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]; each token's values contiguous
    norms: norms to apply to the heads of q and k first (see norm.py); None for none.
    q and k are rotated by `batch.positions` (see rope.py); k and v are written to the cache at `batch.slot_mapping`.
    The memory of q and k may be overwritten.

paged_attention(q, batch, layer, scale, window, *, softcap, sinks, chunk) -> [tokens, heads, head_dim]
    q: [tokens, heads, head_dim]; query head h reads KV head h // (heads / kv_heads).
    In a sequence with kv_len L and Q query rows, row i is at position L - Q + i. It sees the positions up to its own,
    whose K and V must have been written: with a window w only the last w of them, with a chunk c only those from the
    last multiple of c on. With `batch.span_ends` it also sees later positions, up to the end of its span.
    A score s is q @ k times `scale`, or with a softcap, softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118).
    sinks: [heads] of q's dtype, one more score per head, whose key has no value: it only takes weight from the others
    (gpt-oss, arXiv:2508.10925).

Tokens with slot -1, sequences with kv_len 0, and -1 in `batch.single` are padding: nothing is written or read for them.
Output rows of a padding sequence are 0; rows that belong to no sequence are undefined.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops import dispatch
from engine.model.ops.norm import HeadNorms, rms_norm_plain
from engine.model.ops.rope import rotate_plain


def select(dtype: torch.dtype, device: torch.device) -> ModuleType:
    """Return the module with the fastest versions of both ops."""
    return dispatch.module_of(dtype, device, cpu="attention", gpu="libraries.attention") or sys.modules[__name__]


def rotate_and_write(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, batch: Batch, layer: int, norms: HeadNorms | None = None
) -> Tensor:
    if norms is not None:
        q, k = norms.apply(rms_norm_plain, q, k)
    write_kv(rotate_plain(k, table, batch.positions), v, batch, layer)
    return rotate_plain(q, table, batch.positions)


def write_kv(k: Tensor, v: Tensor, batch: Batch, layer: int) -> None:
    block_size = batch.kv_cache.shape[4]
    real = batch.slot_mapping >= 0
    k, v, slots = k[real], v[real], batch.slot_mapping[real]
    if batch.kv_scales is not None:
        k, v = (to_fp8(values, scale) for values, scale in zip((k, v), batch.kv_scales[layer], strict=True))
    blocks, offsets = slots // block_size, slots % block_size
    batch.kv_cache[blocks, layer, 0, :, offsets] = k
    batch.kv_cache[blocks, layer, 1, :, offsets] = v


def paged_attention(
    q: Tensor, batch: Batch, layer: int, scale: float, window: int | None = None,
    *, softcap: float | None = None, sinks: Tensor | None = None, chunk: int | None = None,
) -> Tensor:  # fmt: skip
    """Attend sequence by sequence: q [tokens, heads, head_dim] -> the same shape and dtype. sinks: [heads].

    `batch.kv_cache` [num_blocks, layers, 2, kv_heads, block_size, head_dim] holds K and V, this step's included. Query
    head h reads KV head h // (heads / kv_heads).
    """
    out = torch.empty_like(q)
    starts = batch.query_start.tolist()
    for seq, kv_len in enumerate(batch.kv_len.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        if kv_len == 0:  # padding
            out[rows] = 0
            continue
        k, v = gather_kv(batch, seq, layer, kv_len)
        if batch.kv_scales is not None:
            k, v = ((x.float() * scale).to(q.dtype) for x, scale in zip((k, v), batch.kv_scales[layer], strict=True))
        ends = None if batch.span_ends is None else batch.span_ends[rows]
        visible = visible_keys(starts[seq + 1] - starts[seq], kv_len, window, chunk, q.device, ends)
        if softcap is None and sinks is None:
            attended = attend(q[rows].transpose(0, 1), k, v, scale, visible)
        else:
            attended = attend_by_scores(q[rows].transpose(0, 1), k, v, scale, visible, softcap, sinks)
        out[rows] = attended.transpose(0, 1)
    return out


def to_fp8(values: Tensor, scale: Tensor) -> Tensor:
    """Round to float8_e4m3fn with saturation. The cast alone would turn values that are too large into NaN."""
    return (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def gather_kv(batch: Batch, seq: int, layer: int, kv_len: int) -> tuple[Tensor, Tensor]:
    """Return copies of one sequence's K and V, each [kv_heads, kv_len, head_dim]."""
    block_size = batch.kv_cache.shape[4]
    blocks = batch.block_table[seq, : -(-kv_len // block_size)]
    # [blocks, 2, kv_heads, block_size, head_dim] -> [2, kv_heads, blocks * block_size, head_dim]
    k, v = batch.kv_cache[blocks, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :kv_len]
    return k, v


def visible_keys(
    queries: int, length: int, window: int | None, chunk: int | None, device: torch.device, ends: Tensor | None = None
) -> Tensor:
    """Return [queries, length] bool: which keys each of a sequence's last positions sees. ends: see
    Batch.span_ends."""
    position = torch.arange(length - queries, length, device=device)[:, None]
    key = torch.arange(length, device=device)[None]
    visible = key <= position if ends is None else key < ends[:, None]
    if window is not None:
        visible &= key > position - window
    if chunk is not None:
        visible &= key >= position // chunk * chunk
    return visible


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> Tensor:
    """Attend densely. q [heads, queries, head_dim] is at the last positions of k, v [kv_heads, length, head_dim]."""
    # torch's fast kernels need a batch dimension
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=visible, scale=scale, enable_gqa=True)
    return out[0]


def attend_by_scores(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend densely like `attend`, but with scores in float32, which are capped by `softcap` or compete with `sinks`.

    q: [heads, queries, head_dim]; k, v: [kv_heads, length, head_dim]; visible: [queries, length] bool; sinks: [heads].
    Returns [heads, queries, head_dim] of q's dtype.
    """
    group = q.shape[0] // k.shape[0]
    k, v = (x.float().repeat_interleave(group, dim=0) for x in (k, v))
    scores = q.float() @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(-1, q.shape[1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    return (scores.softmax(-1)[..., : k.shape[1]] @ v).to(q.dtype)
