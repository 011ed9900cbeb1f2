"""Paged attention on a CPU.

A sequence that computes one token (decode) is attended page by page, where its KV lies, with a running softmax
(FlashAttention, arXiv:2205.14135, section 3.1); the work is shared out by sequence and KV head. A chunk of several
tokens has enough work per byte for its KV to be gathered once and given to torch's flash kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.ops import attention_plain
from engine.ops.cpu.kernel import (
    Kernel,
    as_bf16,
    as_f32,
    as_i32,
    as_i64,
    constants,
    device_function,
    exp,
    kernel,
    load,
    store,
    take,
)
from engine.ops.cpu.vector import LANES, add_weighted, dot_rows, exp_of_difference, highest, prefetch

TOKENS = 8  # whose KV a thread writes at a time
NO_WINDOW = 2**62
TILE_TOKENS = 32
ITEMS_PER_THREAD = 4
LOWEST = np.float32(-1e30)  # a score that counts as none; infinities are not safe under fast math


@device_function
def write_rows(cast: Any, args: Any) -> None:
    k, v, cache, slots = cast(args[1]), cast(args[2]), cast(args[3]), as_i64(args[4])
    tokens, k_stride, v_stride, kv_heads = args[5], args[6], args[7], args[8]
    block_size, head_dim, block_stride = args[9], args[10], args[11]
    head_stride = block_size * head_dim
    while True:
        first = take(args, TOKENS)
        if first >= tokens:
            break
        for token in range(first, min(first + TOKENS, tokens)):
            slot = slots[token]
            base = slot // block_size * block_stride + slot % block_size * head_dim
            for head in range(kv_heads):
                k_from, v_from = token * k_stride + head * head_dim, token * v_stride + head * head_dim
                k_to = base + head * head_stride
                v_to = k_to + kv_heads * head_stride
                for i in range(head_dim):
                    cache[k_to + i] = k[k_from + i]
                    cache[v_to + i] = v[v_from + i]


@kernel
def write_bf16(args: Any) -> None:
    write_rows(as_bf16, args)


@kernel
def write_f32(args: Any) -> None:
    write_rows(as_f32, args)


WRITE = Kernel({torch.bfloat16: write_bf16, torch.float32: write_f32})


def write_kv(k: Tensor, v: Tensor, batch: Batch, layer: int) -> None:
    cache = batch.kv_cache
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    items = -(-k.shape[0] // TOKENS)
    WRITE.launch(
        k.dtype, items, k, v, cache[0, layer], batch.slot_mapping,
        k.shape[0], k.stride(0), v.stride(0), kv_heads, block_size, head_dim, cache.stride(0),
    )  # fmt: skip


@device_function
def attend_rows(cast: Any, args: Any) -> None:
    """Items are (sequence, range of `span` KV heads): the KV of neighbouring heads lies side by side in a block."""
    q, cache, out, numbers = cast(args[1]), cast(args[2]), cast(args[3]), as_f32(args[4])
    sequences, query_start, kv_lens, tables = as_i32(args[5]), as_i32(args[6]), as_i32(args[7]), as_i32(args[8])
    items, table_stride, q_stride, out_stride = args[9], args[10], args[11], args[12]
    kv_heads, span, group, block_size, head_dim, block_stride, window = (
        args[13], args[14], args[15], args[16], args[17], args[18], args[19],
    )  # fmt: skip
    head_stride = block_size * head_dim
    heads, ranges = span * group, kv_heads // span
    tile = max(TILE_TOKENS // block_size, 1)  # blocks whose scores are known before the softmax moves on
    room = (tile * block_size + LANES - 1) // LANES * LANES + LANES
    scratch = np.empty(2 * heads * head_dim + room, np.float32)
    tops, totals = np.empty(heads, np.float32), np.empty(heads, np.float32)
    queries = scratch.ctypes.data
    sums = queries + 4 * heads * head_dim
    scores = sums + 4 * heads * head_dim
    while True:
        item = take(args, 1)
        if item >= items:
            break
        seq, first_head = sequences[item // ranges], item % ranges * span
        row, kv_len = np.int64(query_start[seq]), np.int64(kv_lens[seq])
        table = seq * table_stride
        source = row * q_stride + first_head * group * head_dim
        for i in range(heads * head_dim):
            as_f32(queries)[i] = load(q, source + i) * numbers[0]
            as_f32(sums)[i] = np.float32(0.0)
        for h in range(heads):
            tops[h], totals[h] = LOWEST, np.float32(0.0)
        lowest = max(kv_len - window, 0)
        blocks = (kv_len + block_size - 1) // block_size
        for start in range(lowest // block_size, blocks, tile):
            stop = min(start + tile, blocks)
            first = max(lowest, start * block_size)  # tokens [first, last) are in this tile, and visible
            last = min(kv_len, stop * block_size)
            padded = (last - first + LANES - 1) // LANES * LANES
            for h in range(heads):
                head = (first_head + h // group) * head_stride
                for index in range(start, stop):
                    begin, end = max(index * block_size, first), min((index + 1) * block_size, last)
                    keys = np.int64(tables[table + index]) * block_stride + head
                    keys += (begin - index * block_size) * head_dim
                    if h % group == 0 and index + tile < blocks:
                        # pages lie anywhere, so no hardware prefetcher finds the next ones
                        after = np.int64(tables[table + index + tile]) * block_stride + head
                        prefetch(cache, after, head_stride)
                        prefetch(cache, after + kv_heads * head_stride, head_stride)
                    query = as_f32(queries + 4 * h * head_dim)
                    dot_rows(as_f32(scores + 4 * (begin - first)), query, cache, keys, end - begin, head_dim)
                for t in range(last - first, padded):
                    as_f32(scores)[t] = LOWEST
                top = max(tops[h], highest(as_f32(scores), padded))
                shrink = exp(tops[h] - top)
                totals[h] = totals[h] * shrink + exp_of_difference(as_f32(scores), padded, top)
                tops[h] = top
                for index in range(start, stop):
                    begin, end = max(index * block_size, first), min((index + 1) * block_size, last)
                    values = np.int64(tables[table + index]) * block_stride + kv_heads * head_stride + head
                    values += (begin - index * block_size) * head_dim
                    target, weights = as_f32(sums + 4 * h * head_dim), as_f32(scores + 4 * (begin - first))
                    add_weighted(target, weights, end - begin, cache, values, head_dim, shrink)
                    shrink = np.float32(1.0)
        target = row * out_stride + first_head * group * head_dim
        for h in range(heads):
            factor = np.float32(1.0) / totals[h]
            for i in range(h * head_dim, (h + 1) * head_dim):
                store(out, target + i, as_f32(sums)[i] * factor)
    scratch[0] = 0.0  # Numba frees an array after its last use, and does not see the pointers into it


@kernel
def attend_bf16(args: Any) -> None:
    attend_rows(as_bf16, args)


@kernel
def attend_f32(args: Any) -> None:
    attend_rows(as_f32, args)


ATTEND = Kernel({torch.bfloat16: attend_bf16, torch.float32: attend_f32})


def paged_attention(q: Tensor, batch: Batch, layer: int, scale: float, window: int | None = None) -> Tensor:
    if q.shape[2] % LANES:
        return attention_plain.paged_attention(q, batch, layer, scale, window)
    out = torch.empty(q.shape, dtype=q.dtype)
    if len(batch.single):
        attend_single(q, batch, layer, scale, window, out)
    for chunk in batch.chunks:
        rows = slice(chunk.first_row, chunk.first_row + chunk.count)
        k, v = attention_plain.gather_kv(batch, chunk.seq, layer, chunk.kv_len)
        queries = q[rows].transpose(0, 1)
        if window is None or window >= chunk.kv_len:
            out[rows] = attend_chunk(queries, k, v, scale).transpose(0, 1)
        else:
            out[rows] = attention_plain.attend(queries, k, v, scale, window).transpose(0, 1)
    return out


def attend_chunk(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """As `attention_plain.attend` without a window, and without a mask: what lies before the chunk is seen whole, the
    chunk itself causally, and the two are merged by the logarithms of their sums (arXiv:2205.14135, section 3.1)."""
    group, before = q.shape[0] // k.shape[0], k.shape[1] - q.shape[1]
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own, own_sum = flash(q[None], k[None, :, before:], v[None, :, before:], 0.0, True, scale=scale)
    if before == 0:
        return own[0]
    past, past_sum = flash(q[None], k[None, :, :before], v[None, :, :before], 0.0, False, scale=scale)
    share = torch.sigmoid(past_sum - own_sum).unsqueeze(-1)
    return torch.lerp(own.float(), past.float(), share)[0].to(q.dtype)


def attend_single(q: Tensor, batch: Batch, layer: int, scale: float, window: int | None, out: Tensor) -> None:
    """Fill the rows of `out` that belong to sequences with one token."""
    cache = batch.kv_cache
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    sequences = len(batch.single)
    # all heads of a sequence at once, unless that leaves threads without work
    span = kv_heads if sequences >= ITEMS_PER_THREAD * torch.get_num_threads() else 1
    items = sequences * (kv_heads // span)
    ATTEND.launch(
        q.dtype, items, q, cache[0, layer], out, constants(scale),
        batch.single, batch.query_start, batch.kv_len, batch.block_table,
        items, batch.block_table.stride(0), q.stride(0), out.stride(0),
        kv_heads, span, q.shape[1] // kv_heads, block_size, head_dim, cache.stride(0),
        window or NO_WINDOW,
    )  # fmt: skip
