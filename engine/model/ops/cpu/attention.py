"""Paged attention on a CPU.

KV is read in place, a tile of tokens at a time (attention_tile.py). Work is divided by rows and KV heads. An item of
work is one row of a decoding sequence, or some rows of a prompt chunk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops import attention
from engine.model.ops.cpu.attention_tile import (
    NO_WINDOW,
    TILE_TOKENS,
    Space,
    attend_tile,
    begin_query,
    end_query,
    memory_for,
    space_in,
)
from engine.model.ops.cpu.kernel import (
    TokenCount,
    as_f32,
    as_i32,
    as_i64,
    constants,
    device_function,
    each_dtype,
    empty,
    load,
    store,
    work,
)
from engine.model.ops.cpu.norm import rms_norm
from engine.model.ops.cpu.rope import rotate_head
from engine.model.ops.cpu.vector import LANES, LOG2_E
from engine.model.ops.latent import attention as plain_latent
from engine.model.ops.norm import HeadNorms

TOKENS = 4  # tokens whose KV a thread writes at a time
TILE_ROWS = 128  # most rows of a tile, which read a key while it is in the core's cache
ITEMS_PER_THREAD = 4


@device_function
def rotate_and_write_rows(cast: Any, args: Any) -> None:
    q, k, v, table, positions = cast(args[1]), cast(args[2]), cast(args[3]), cast(args[4]), as_i64(args[5])
    cache, slots, tokens = cast(args[6]), as_i64(args[7]), args[8]
    q_stride, k_stride, v_stride, heads, kv_heads = args[9], args[10], args[11], args[12], args[13]
    head_dim, half, block_size, block_stride = args[14], args[15], args[16], args[17]
    head_stride = block_size * head_dim
    for token in work(args, tokens, TOKENS):
        angles, slot = positions[token] * 2 * half, slots[token]
        for head in range(heads):
            rotate_head(q, token * q_stride + head * head_dim, table, angles, half)
        if slot < 0:
            continue
        base = slot // block_size * block_stride + slot % block_size * head_dim
        for head in range(kv_heads):
            k_from, v_from = token * k_stride + head * head_dim, token * v_stride + head * head_dim
            k_to = base + head * head_stride
            v_to = k_to + kv_heads * head_stride
            rotate_head(k, k_from, table, angles, half)
            for i in range(head_dim):
                cache[k_to + i] = k[k_from + i]
                cache[v_to + i] = v[v_from + i]


ROTATE_AND_WRITE = each_dtype(rotate_and_write_rows)


def rotate_and_write(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, batch: Batch, layer: int, norms: HeadNorms | None = None
) -> Tensor:
    """Rotate q [tokens, heads, head_dim] and return it; rotate k and write k and v [tokens, kv_heads, head_dim] to the
    cache. table: [positions, rotary_dim]. The memory of q and k may be overwritten."""
    if norms is not None:
        q, k = norms.apply(rms_norm, q, k)
    if batch.kv_scales is not None:
        return attention.rotate_and_write(q, k, v, table, batch, layer)
    (tokens, heads, head_dim), cache = q.shape, batch.kv_cache
    ROTATE_AND_WRITE.launch(
        q.dtype, -(-tokens // TOKENS), q, k, v, table, batch.positions, cache[0, layer], batch.slot_mapping,
        TokenCount(tokens), q.stride(0), k.stride(0), v.stride(0), heads, k.shape[1], head_dim, table.shape[1] // 2,
        cache.shape[4], cache.stride(0),
    )  # fmt: skip
    return q


@device_function
def find_keys(
    space: Space, side: int, start: int, first: int, last: int, table: Any, block_size: int, head_dim: int,
    block_stride: int, base: int, kv_size: int, size: int,
) -> None:  # fmt: skip
    """Set the addresses of a tile's keys and values, for one head. Tokens before `first` or after `last` need not
    have KV. For them, the KV of `first` or `last` is read, whichever is nearer."""
    key_at, value_at = as_i64(space.key_at + 8 * TILE_TOKENS * side), as_i64(space.value_at + 8 * TILE_TOKENS * side)
    low, high = max(first - start, 0), min(last - start, TILE_TOKENS - 1)
    block, offset = (start + low) // block_size, (start + low) % block_size
    for t in range(low, high + 1):
        address = base + size * (np.int64(table[block]) * block_stride + offset * head_dim)
        key_at[t], value_at[t] = address, address + kv_size
        offset += 1
        if offset == block_size:
            block, offset = block + 1, 0
    for t in range(low):
        key_at[t], value_at[t] = key_at[low], value_at[low]
    for t in range(high + 1, TILE_TOKENS):
        key_at[t], value_at[t] = key_at[high], value_at[high]


@device_function
def attend_rows(cast: Any, size: int, args: Any) -> None:
    """Attend, item by item. An item consists of some rows of a sequence and `span` adjacent KV heads. A `query` is one
    head of one row. Queries of an item that share a KV head find its KV in the core's cache."""
    q, out, numbers = cast(args[1]), cast(args[3]), as_f32(args[4])
    tiles, kv_lens = as_i64(args[5]), as_i32(args[6])
    table_stride, q_stride, out_stride, kv_heads, group = args[8], args[9], args[10], args[11], args[12]
    block_size, head_dim, block_stride, window, chunk = args[13], args[14], args[15], args[16], args[17]
    scale, softcap, sinks, span_ends = numbers[0], numbers[1], cast(args[18]), as_i32(args[19])
    head_size = size * block_size * head_dim
    value_offset = args[20] * kv_heads * head_size  # 0 if keys are also the values
    max_rows, span = tiles[1], 1 if tiles[2] else kv_heads
    ranges = kv_heads // span
    items = tiles[0] * ranges
    max_queries = max_rows * span * group
    memory = memory_for(max_queries, head_dim)
    space = space_in(memory, max_queries, head_dim)
    for item in work(args, items):
        # consecutive items are tiles of one sequence, which see the same keys
        tile, first_head = 4 * (1 + item % tiles[0]), item // tiles[0] * span
        seq, row, rows, behind = tiles[tile], tiles[tile + 1], tiles[tile + 2], tiles[tile + 3]
        if kv_lens[seq] == 0:  # padding
            for r in range(row, row + rows):
                for i in range(first_head * group * head_dim, (first_head + span) * group * head_dim):
                    store(out, r * out_stride + i, np.float32(0.0))
            continue
        kv_len = np.int64(kv_lens[seq]) - behind  # of the last row; each earlier row has one token less
        for query in range(span * rows * group):
            r, head = query // group % rows, (first_head + query // (rows * group)) * group + query % group
            begin_query(space, query, cast, q, (row + r) * q_stride + head * head_dim, head_dim)
            if args[18]:
                as_f32(space.tops)[query] = load(sinks, head) * LOG2_E
                as_f32(space.totals)[query * LANES] = np.float32(1.0)
            length = kv_len - rows + 1 + r
            as_i64(space.begins)[query] = max(length - window, (length - 1) // chunk * chunk, 0)
            as_i64(space.ends)[query] = np.int64(span_ends[row + r]) if args[19] else length
        first, kv_len = as_i64(space.begins)[0], as_i64(space.ends)[span * rows * group - 1]
        start = first // TILE_TOKENS * TILE_TOKENS
        table, base = as_i32(args[7] + 4 * seq * table_stride), args[2] + first_head * head_size
        find_keys(
            space, 0, start, first, kv_len - 1, table, block_size, head_dim, block_stride, base, value_offset,
            size,
        )  # fmt: skip
        side = 0
        while start < kv_len:
            after = start + TILE_TOKENS
            if after < kv_len:
                find_keys(
                    space, 1 - side, after, first, kv_len - 1, table, block_size, head_dim, block_stride, base,
                    value_offset, size,
                )  # fmt: skip
            count = min(kv_len - start, TILE_TOKENS)
            for head in range(span):
                # blocks are scattered, so no hardware prefetcher finds what comes next: the next head of this tile, or
                # the first head of the next tile
                next_side, next_offset = side, (head + 1) * head_size
                if head + 1 == span:
                    next_side, next_offset = 1 - side, 0
                attend_tile(
                    space, cast, size, side, head * rows * group, rows * group, start, count, head_dim,
                    head * head_size, head * head_size, next_side, next_offset, scale, softcap,
                )  # fmt: skip
            start, side = after, 1 - side
        for query in range(span * rows * group):
            r, head = query // group % rows, (first_head + query // (rows * group)) * group + query % group
            end_query(space, query, out, (row + r) * out_stride + head * head_dim, head_dim)
    memory[0] = 0  # Numba frees an array after its last use, and does not see the pointers into it


ATTEND = each_dtype(attend_rows)


def paged_attention(
    q: Tensor, batch: Batch, layer: int, scale: float, window: int | None = None,
    *, softcap: float | None = None, sinks: Tensor | None = None, chunk: int | None = None,
) -> Tensor:  # fmt: skip
    """Attend: q [tokens, heads, head_dim] -> the same shape and dtype. sinks: [heads] of q's dtype."""
    scores: dict[str, Any] = {"softcap": softcap, "sinks": sinks, "chunk": chunk}
    assert sinks is None or sinks.dtype == q.dtype, "the kernel reads sinks as it reads q"
    if batch.tiles is None:
        batch.tiles = row_tiles(batch)
    if batch.kv_scales is not None:
        return paged_attention(q, dequantized(batch, layer, q.dtype), 0, scale, window, **scores)
    if rest := -q.shape[2] % LANES:
        out = paged_attention(*padded_heads(q, batch, layer, rest), 0, scale, window, **scores)
        return out[..., :-rest].contiguous()
    cache, out = batch.kv_cache, empty(q.shape, q.dtype)
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    ATTEND.launch(
        q.dtype, (len(batch.tiles) - 1) * kv_heads, q, cache[0, layer], out, constants(scale, softcap or 0.0),
        batch.tiles, batch.kv_len, batch.block_table, batch.block_table.stride(0), q.stride(0), out.stride(0),
        kv_heads, q.shape[1] // kv_heads, block_size, head_dim, cache.stride(0), window or NO_WINDOW,
        chunk or NO_WINDOW, 0 if sinks is None else sinks, 0 if batch.span_ends is None else batch.span_ends, 1,
    )  # fmt: skip
    return out


def latent_attention(q: Tensor, batch: Batch, layer: int, scale: float, rank: int) -> Tensor:
    """Attend: q [tokens, heads, head_dim] -> [tokens, heads, rank]. Like `paged_attention`, uses the plain version for
    a cache in float8. All heads read the same vectors, so a tile has all heads of a few rows."""
    if batch.kv_scales is not None:
        return plain_latent.latent_attention(q, batch, layer, scale, rank)
    if batch.latent_tiles is None:
        batch.latent_tiles = latent_tiles(batch, q.shape[1])
    if rest := -q.shape[2] % LANES:
        return latent_attention(*padded_heads(q, batch, layer, rest), 0, scale, rank)
    cache, heads, tiles = batch.kv_cache, q.shape[1], batch.latent_tiles
    (block_size, head_dim), out = cache.shape[4:], empty(q.shape, q.dtype)
    ATTEND.launch(
        q.dtype, len(tiles) - 1, q, cache[0, layer], out, constants(scale, 0.0), tiles, batch.kv_len,
        batch.block_table, batch.block_table.stride(0), q.stride(0), out.stride(0), 1, heads, block_size, head_dim,
        cache.stride(0), NO_WINDOW, NO_WINDOW, 0, 0, 0,
    )  # fmt: skip
    return out[..., :rank]


def padded_heads(q: Tensor, batch: Batch, layer: int, rest: int) -> tuple[Tensor, Batch]:
    """Append `rest` zeros to each head, which change no score. Returns q, and a batch whose cache has one layer: copies
    of the blocks that this step reads."""
    table, blocks = read_blocks(batch, layer)
    cache = F.pad(blocks, (0, rest))[:, None]
    return F.pad(q, (0, rest)), replace(batch, block_table=table, kv_cache=cache)


def dequantized(batch: Batch, layer: int, dtype: torch.dtype) -> Batch:
    """Return a batch whose cache has one layer: the blocks that this step reads, as the numbers that a cache in float8
    stands for."""
    assert batch.kv_scales is not None
    table, blocks = read_blocks(batch, layer)
    cache = (blocks.float() * batch.kv_scales[layer][:, None, None, None]).to(dtype)[:, None]
    return replace(batch, block_table=table, kv_cache=cache, kv_scales=None)


def read_blocks(batch: Batch, layer: int) -> tuple[Tensor, Tensor]:
    """Copy the blocks of a layer that this step reads: a block table, and [blocks, 2, kv_heads, block_size,
    head_dim]."""
    counts = -(-batch.kv_len // batch.kv_cache.shape[4])
    read = torch.arange(batch.block_table.shape[1]) < counts[:, None]
    table = torch.zeros_like(batch.block_table)
    table[read] = torch.arange(int(counts.sum()), dtype=table.dtype)
    return table, batch.kv_cache[batch.block_table[read], layer]


def latent_tiles(batch: Batch, heads: int) -> Tensor:
    """Cut a batch into tiles of TILE_ROWS / heads rows, at least one row each."""
    return row_tiles(batch, max(1, TILE_ROWS // heads))


def row_tiles(batch: Batch, tile_rows: int = TILE_ROWS) -> Tensor:
    """Cut a batch into tiles. Return [1 + tiles, 4] int64, for each tile: sequence, first row, number of rows, and how
    many rows the sequence has after these. The first entry holds the number of tiles, the largest number of rows of a
    tile, and whether KV heads are separate items.

    The last rows of a chunk come first: they see the most keys, so that threads finish together.
    """
    tiles = []
    for chunk in batch.chunks:
        for row in range((chunk.count - 1) // tile_rows * tile_rows, -1, -tile_rows):
            rows = min(tile_rows, chunk.count - row)
            tiles.append((chunk.seq, chunk.first_row + row, rows, chunk.count - row - rows))
    first_rows = batch.query_start[batch.single].tolist()
    tiles += [(seq, row, 1, 0) for seq, row in zip(batch.single.tolist(), first_rows, strict=True) if seq >= 0]
    # all heads of a row at once, unless that leaves threads idle or exceeds the core's cache
    spread = bool(batch.chunks) or len(tiles) < ITEMS_PER_THREAD * torch.get_num_threads()
    return torch.tensor([(len(tiles), tile_rows if batch.chunks else 1, spread, 0), *tiles], dtype=torch.int64)
