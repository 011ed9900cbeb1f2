"""Paged attention on a CPU.

KV is read block by block in place, with a running softmax (FlashAttention, arXiv:2205.14135, section 3.1). The work is
divided by rows and KV heads: one row of a sequence that decodes, a few rows of a prompt chunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops import attention_plain
from engine.model.ops.cpu.kernel import (
    Kernel,
    as_bf16,
    as_f32,
    as_i32,
    as_i64,
    constants,
    device_function,
    empty,
    exp,
    kernel,
    load,
    store,
    take,
)
from engine.model.ops.cpu.rope import rotate
from engine.model.ops.cpu.vector import LANES, add_weighted, dot_rows, exp_of_difference, highest, prefetch

TOKENS = 8  # whose KV a thread writes at a time
NO_WINDOW = 2**62
# keys whose scores are computed before their values are summed: the same for rows of chunks and for rows that decode,
# and counted from the sequence's first token, so that a row's sums have one order whatever it is computed with
TILE_TOKENS = 64
TILE_ROWS = 16  # rows of a chunk that read a key while it is in the core's cache
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


def rotate_and_write(q: Tensor, k: Tensor, v: Tensor, table: Tensor, batch: Batch, layer: int) -> Tensor:
    write_kv(rotate(k, table, batch.positions), v, batch, layer)
    return rotate(q, table, batch.positions)


def write_kv(k: Tensor, v: Tensor, batch: Batch, layer: int) -> None:
    cache = batch.kv_cache
    if batch.kv_scales is not None:
        attention_plain.write_kv(k, v, batch, layer)
        return
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    items = -(-k.shape[0] // TOKENS)
    WRITE.launch(
        k.dtype, items, k, v, cache[0, layer], batch.slot_mapping,
        k.shape[0], k.stride(0), v.stride(0), kv_heads, block_size, head_dim, cache.stride(0),
    )  # fmt: skip


@device_function
def attend_rows(cast: Any, args: Any) -> None:
    """An item is some rows of a sequence and `span` of its KV heads, whose KV is adjacent in a block. A `query` is one
    head of one row; queries of an item with the same KV head find it in the core's cache."""
    q, cache, out, numbers = cast(args[1]), cast(args[2]), cast(args[3]), as_f32(args[4])
    tiles, kv_lens, tables = as_i64(args[5]), as_i32(args[6]), as_i32(args[7])
    items, max_rows, table_stride, q_stride, out_stride = args[8], args[9], args[10], args[11], args[12]
    kv_heads, span, group, block_size, head_dim, block_stride, window, chunk = (
        args[13], args[14], args[15], args[16], args[17], args[18], args[19], args[20],
    )  # fmt: skip
    softcap, sinks = numbers[1], cast(args[21])
    head_stride = block_size * head_dim
    heads, ranges = span * group, kv_heads // span
    max_queries = max_rows * heads
    step = max(args[22] // block_size, 1)  # blocks whose scores are known before the softmax moves on
    score_space = (step * block_size + LANES - 1) // LANES * LANES + LANES
    scratch = np.empty(2 * max_queries * head_dim + score_space, np.float32)
    tops, totals = np.empty(max_queries, np.float32), np.empty(max_queries, np.float32)
    begins = np.empty(max_rows, np.int64)  # the first token that each row sees
    queries = scratch.ctypes.data
    sums = queries + 4 * max_queries * head_dim
    scores = sums + 4 * max_queries * head_dim
    while True:
        item = take(args, 1)
        if item >= items:
            break
        tile, first_head = 4 * (item // ranges), item % ranges * span
        seq, row, rows, behind = tiles[tile], tiles[tile + 1], tiles[tile + 2], tiles[tile + 3]
        table = seq * table_stride
        kv_len = np.int64(kv_lens[seq]) - behind  # of the last row; each row before it sees one token less
        for r in range(rows):
            source = (row + r) * q_stride + first_head * group * head_dim
            for i in range(heads * head_dim):
                as_f32(queries)[r * heads * head_dim + i] = load(q, source + i) * numbers[0]
                as_f32(sums)[r * heads * head_dim + i] = np.float32(0.0)
            length = kv_len - rows + 1 + r
            begins[r] = max(length - window, (length - 1) // chunk * chunk)
        for query in range(rows * heads):
            tops[query], totals[query] = LOWEST, np.float32(0.0)
            if args[21]:
                tops[query] = load(sinks, first_head * group + query % heads)
                totals[query] = np.float32(1.0)
        blocks = (kv_len + block_size - 1) // block_size
        for start in range(max(begins[0], 0) // block_size // step * step, blocks, step):
            stop = min(start + step, blocks)
            for h in range(heads):
                head = (first_head + h // group) * head_stride
                for r in range(rows):
                    length = kv_len - rows + 1 + r
                    first = max(begins[r], start * block_size)  # tokens [first, last) are here, and visible
                    last = min(length, stop * block_size)
                    if first >= last:
                        continue
                    query = r * heads + h
                    for index in range(first // block_size, (last + block_size - 1) // block_size):
                        begin, end = max(index * block_size, first), min((index + 1) * block_size, last)
                        keys = np.int64(tables[table + index]) * block_stride + head
                        last_head = h + group == heads
                        if h % group == 0 and r == 0 and (index + step < blocks or not last_head):
                            # blocks lie anywhere, so no hardware prefetcher finds what comes next: the next head's part
                            # of this block, or the first head's part of a block of the next tile
                            after = keys + head_stride
                            if last_head:
                                after = np.int64(tables[table + index + step]) * block_stride + first_head * head_stride
                            prefetch(cache, after, head_stride)
                            prefetch(cache, after + kv_heads * head_stride, head_stride)
                        keys += (begin - index * block_size) * head_dim
                        vector = as_f32(queries + 4 * query * head_dim)
                        dot_rows(as_f32(scores + 4 * (begin - first)), vector, cache, keys, end - begin, head_dim)
                    if softcap > np.float32(0.0):
                        for t in range(last - first):
                            power = exp(as_f32(scores)[t] * (np.float32(2.0) / softcap))  # for the tanh
                            as_f32(scores)[t] = softcap - np.float32(2.0) * softcap / (power + np.float32(1.0))
                    padded = (last - first + LANES - 1) // LANES * LANES
                    for t in range(last - first, padded):
                        as_f32(scores)[t] = LOWEST
                    top = max(tops[query], highest(as_f32(scores), padded))
                    shrink = exp(tops[query] - top)
                    totals[query] = totals[query] * shrink + exp_of_difference(as_f32(scores), padded, top)
                    tops[query] = top
                    for index in range(first // block_size, (last + block_size - 1) // block_size):
                        begin, end = max(index * block_size, first), min((index + 1) * block_size, last)
                        values = np.int64(tables[table + index]) * block_stride + kv_heads * head_stride + head
                        values += (begin - index * block_size) * head_dim
                        target, weights = as_f32(sums + 4 * query * head_dim), as_f32(scores + 4 * (begin - first))
                        add_weighted(target, weights, end - begin, cache, values, head_dim, shrink)
                        shrink = np.float32(1.0)
        for query in range(rows * heads):
            factor = np.float32(1.0) / totals[query]
            target = (row + query // heads) * out_stride + (first_head * group + query % heads) * head_dim
            for i in range(head_dim):
                store(out, target + i, as_f32(sums)[query * head_dim + i] * factor)
    scratch[0] = 0.0  # Numba frees an array after its last use, and does not see the pointers into it


@kernel
def attend_bf16(args: Any) -> None:
    attend_rows(as_bf16, args)


@kernel
def attend_f32(args: Any) -> None:
    attend_rows(as_f32, args)


ATTEND = Kernel({torch.bfloat16: attend_bf16, torch.float32: attend_f32})


def paged_attention(
    q: Tensor, batch: Batch, layer: int, scale: float, window: int | None = None,
    *, softcap: float | None = None, sinks: Tensor | None = None, chunk: int | None = None,
) -> Tensor:  # fmt: skip
    cache = batch.kv_cache
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    if head_dim % LANES or batch.kv_scales is not None:
        return attention_plain.paged_attention(
            q, batch, layer, scale, window, softcap=softcap, sinks=sinks, chunk=chunk
        )
    assert sinks is None or sinks.dtype == q.dtype, "the kernel reads sinks as it reads q"
    out = empty(q.shape, q.dtype)
    if batch.tiles is None:
        batch.tiles = row_tiles(batch)
    tiles, max_rows = batch.tiles, TILE_ROWS if batch.chunks else 1
    # all heads of a row at once, unless that leaves threads idle or exceeds the core's cache
    spread = max_rows > 1 or len(tiles) < ITEMS_PER_THREAD * torch.get_num_threads()
    span = 1 if spread else kv_heads
    items = len(tiles) * (kv_heads // span)
    ATTEND.launch(
        q.dtype, items, q, cache[0, layer], out, constants(scale, softcap or 0.0), tiles, batch.kv_len,
        batch.block_table, items, max_rows, batch.block_table.stride(0), q.stride(0), out.stride(0),
        kv_heads, span, q.shape[1] // kv_heads, block_size, head_dim, cache.stride(0), window or NO_WINDOW,
        chunk or NO_WINDOW, 0 if sinks is None else sinks, TILE_TOKENS,
    )  # fmt: skip
    return out


def row_tiles(batch: Batch) -> Tensor:
    """[tiles, 4] int64: sequence, first row, number of rows, and how many rows the sequence has after these.

    The last rows of a chunk come first, since they see the most keys: threads then finish together.
    """
    tiles = []
    for chunk in batch.chunks:
        for row in range((chunk.count - 1) // TILE_ROWS * TILE_ROWS, -1, -TILE_ROWS):
            rows = min(TILE_ROWS, chunk.count - row)
            tiles.append((chunk.seq, chunk.first_row + row, rows, chunk.count - row - rows))
    first_rows = batch.query_start[batch.single].tolist()
    tiles += [(seq, row, 1, 0) for seq, row in zip(batch.single.tolist(), first_rows, strict=True)]
    return torch.tensor(tiles, dtype=torch.int64).view(-1, 4)
