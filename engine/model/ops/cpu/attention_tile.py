"""The common part of both attention kernels: rows of queries against a tile of keys, as products of matrices.

The softmax is a running one (FlashAttention, arXiv:2205.14135, section 3.1). Tiles of keys begin at multiples of
TILE_TOKENS from the sequence's first token, and each sum within a tile has a fixed order. So a row has the same bits
whether it is computed alone, among the rows of a chunk, or after a cached prefix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from engine.model.ops.cpu.kernel import as_f32, as_i64, device_function, exp
from engine.model.ops.cpu.tiles.tile_product import (
    COLUMNS,
    ROWS,
    add_product_of_rows,
    add_product_tile,
    multiply_columns,
    pack_columns,
    pack_row,
    product_tile,
    rows_at_once,
)
from engine.model.ops.cpu.vector import CACHE_LINE_BYTES, LANES, LOG2_E, clear, copy, divide_by_total, prefetch, weigh

TILE_TOKENS = 128
PART_TOKENS = 16  # tokens of the next tile to prefetch with each few rows of a tile
FEW_ROWS = 4  # up to this many rows, keys and values are read in place, not packed
NO_WINDOW = 2**62
LOWEST = np.float32(-1e30)  # the score of a key that is not seen; infinities are not safe under fast math
LOWEST_TOP = np.float32(-1e20)  # above LOWEST, so that keys weigh 0 even in a row that sees none


class Space(NamedTuple):
    """A thread's memory, as addresses. A `query` is one head of one row."""

    queries: int  #: [queries, head_dim] of q's dtype
    sums: int  #: [queries, width] float32, weighted sums of values
    totals: int  #: [queries, LANES] float32, sums of weights
    keys: int  #: [words of head_dim, TILE_TOKENS]
    values: int  #: [words of TILE_TOKENS, width]
    scores: int  #: [ROWS, TILE_TOKENS] float32
    weights: int  #: [ROWS, TILE_TOKENS] of q's dtype
    key_at: int  #: [2, TILE_TOKENS] int64, addresses of the keys of this tile and of the next
    value_at: int  #: [2, TILE_TOKENS] int64
    begins: int  #: [queries] int64, first token that each sees
    ends: int  #: [queries] int64, token after the last that each sees
    tops: int  #: [queries] float32, highest score so far, as a power of 2
    shrinks: int  #: [LANES] float32
    end: int


@device_function
def padded(size: int) -> int:
    return (size + COLUMNS - 1) // COLUMNS * COLUMNS


@device_function
def divide_space(start: int, queries: int, head_dim: int) -> Space:
    """Divide memory that begins at address `start`, a multiple of 64."""
    width, line = padded(head_dim), 4 * TILE_TOKENS
    sums = start + 4 * queries * width
    totals = sums + 4 * queries * width
    keys = totals + 4 * queries * LANES
    values = keys + line * width
    scores = values + line * width
    weights = scores + line * ROWS
    key_at = weights + line * ROWS
    value_at = key_at + 4 * line
    begins = value_at + 4 * line
    ends = begins + 8 * queries
    tops = ends + 8 * queries
    shrinks = tops + 4 * queries
    return Space(
        start, sums, totals, keys, values, scores, weights, key_at, value_at, begins, ends, tops, shrinks,
        shrinks + 4 * LANES,
    )  # fmt: skip


@device_function
def memory_for(queries: int, head_dim: int) -> Any:
    """Return memory for a Space. It is zeroed, since the padding of tiles is read too."""
    return np.zeros(divide_space(0, queries, head_dim).end + CACHE_LINE_BYTES, np.uint8)


@device_function
def space_in(memory: Any, queries: int, head_dim: int) -> Space:
    start = memory.ctypes.data
    return divide_space((start + CACHE_LINE_BYTES - 1) // CACHE_LINE_BYTES * CACHE_LINE_BYTES, queries, head_dim)


@device_function
def begin_query(space: Space, query: int, cast: Any, q: Any, source: int, head_dim: int) -> None:
    """Copy a query from q[source], and clear its sums."""
    width = padded(head_dim)
    copy(cast(space.queries), query * head_dim, q, source, head_dim)
    clear(as_f32(space.sums + 4 * query * width), width)
    clear(as_f32(space.totals + 4 * query * LANES), LANES)
    as_f32(space.tops)[query] = LOWEST_TOP


@device_function
def end_query(space: Space, query: int, out: Any, target: int, head_dim: int) -> None:
    sums = as_f32(space.sums + 4 * query * padded(head_dim))
    divide_by_total(out, target, sums, as_f32(space.totals + 4 * query * LANES), head_dim)


@device_function
def attend_tile(
    space: Space, cast: Any, size: int, side: int, first_query: int, queries: int, start: int, count: int,
    head_dim: int, key_offset: int, value_offset: int, next_side: int, next_offset: int, scale: Any, softcap: Any,
) -> None:  # fmt: skip
    """Add the tile of keys from token `start` on to `queries` queries. Each query sees at least as far as the
    previous one.

    size: bytes of an element. side: which half of `key_at` and `value_at` holds the tile's addresses. They are set for
    `count` tokens, rounded up to a multiple of COLUMNS. Offsets lead from the addresses to this head, in bytes.
    """
    width, words, per_word = padded(head_dim), head_dim * size // 4, 4 // size
    key_at, value_at = space.key_at + 8 * TILE_TOKENS * side, space.value_at + 8 * TILE_TOKENS * side
    next_keys, next_values = space.key_at + 8 * TILE_TOKENS * next_side, space.value_at + 8 * TILE_TOKENS * next_side
    packed = queries > FEW_ROWS
    if packed:
        for t in range(0, padded(count), LANES):
            pack_columns(cast(space.keys + 4 * t), TILE_TOKENS, as_i64(key_at + 8 * t), key_offset, words)
        for t in range(0, padded(count), per_word):
            pack_row(cast(space.values + 4 * (t // per_word) * width), as_i64(value_at + 8 * t), value_offset, head_dim)
    query, last = first_query, first_query + queries
    begins, ends = as_i64(space.begins), as_i64(space.ends)
    while query < last:
        rows = rows_at_once(last - query)
        low = max(begins[query] - start, 0) // COLUMNS * COLUMNS
        high = padded(min(ends[query + rows - 1] - start, count))
        if packed and (next_side != side or next_offset != key_offset):  # prefetch a part of the next tile
            part = (query - first_query) // ROWS * PART_TOKENS % TILE_TOKENS
            prefetch(as_i64(next_keys + 8 * part), PART_TOKENS, next_offset, size * head_dim)
            prefetch(as_i64(next_values + 8 * part), PART_TOKENS, next_offset, size * head_dim)
        if low < high:
            own = cast(space.queries + 4 * query * words)
            if packed:
                for t in range(low, high, COLUMNS):
                    scores = as_f32(space.scores + 4 * t)
                    product_tile(rows, scores, TILE_TOKENS, own, words, cast(space.keys + 4 * t), TILE_TOKENS, words)
            else:
                for t in range(low, high, COLUMNS):
                    prefetch(as_i64(next_keys + 8 * t), COLUMNS, next_offset, size * head_dim)
                    scores = as_f32(space.scores + 4 * t)
                    multiply_columns(rows, scores, TILE_TOKENS, own, as_i64(key_at + 8 * t), key_offset, words)
            factor = scale * LOG2_E
            for r in range(rows):
                scores = as_f32(space.scores + 4 * (r * TILE_TOKENS + low))
                if softcap > np.float32(0.0):
                    factor = LOG2_E
                    for t in range(high - low):
                        power = exp(scores[t] * (np.float32(2.0) * scale / softcap))  # e ** 2x, from which tanh follows
                        scores[t] = softcap - np.float32(2.0) * softcap / (power + np.float32(1.0))
                for t in range(min(begins[query + r] - start, high) - low):
                    scores[t] = LOWEST
                for t in range(max(ends[query + r] - start - low, 0), high - low):
                    scores[t] = LOWEST
            weigh(
                cast(space.weights + size * low), as_f32(space.totals + 4 * LANES * query),
                as_f32(space.tops + 4 * query), as_f32(space.shrinks), as_f32(space.scores + 4 * low), TILE_TOKENS,
                rows, high - low, factor,
            )  # fmt: skip
            sums, shrinks = space.sums + 4 * query * width, as_f32(space.shrinks)
            weights, line = space.weights + size * low, TILE_TOKENS // per_word
            if packed:
                for i in range(0, width, COLUMNS):
                    values = cast(space.values + 4 * (low // per_word * width + i))
                    add_product_tile(
                        rows, as_f32(sums + 4 * i), width, shrinks, cast(weights), line, values, width,
                        (high - low) // per_word,
                    )  # fmt: skip
            else:
                for t in range(low, high, COLUMNS):
                    prefetch(as_i64(next_values + 8 * t), COLUMNS, next_offset, size * head_dim)
                    seen = (min(count - t, COLUMNS) + per_word - 1) // per_word
                    add_product_of_rows(
                        rows, as_f32(sums), width, shrinks, cast(weights + size * (t - low)), line,
                        as_i64(value_at + 8 * t), value_offset, head_dim, seen,
                    )  # fmt: skip
                    for r in range(rows):
                        shrinks[r] = np.float32(1.0)
        query += rows
