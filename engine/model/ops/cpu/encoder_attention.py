"""Attention over whole sequences on a CPU, a tile of tokens at a time (attention_tile.py).

Work is divided by heads and rows. With a window, tiles of keys that no row sees are not read.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.batch import Batch
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
    as_f32,
    as_i64,
    constants,
    device_function,
    each_dtype,
    work,
)
from engine.model.ops.cpu.vector import LANES

TILE_ROWS = 128  # rows of one head that read a key while it is in the core's cache


@device_function
def find_keys(space: Space, start: int, count: int, k: int, v: int, k_stride: int, v_stride: int) -> None:
    """Set the addresses of a tile's keys and values. The rest of an incomplete tile gets the addresses of its last
    token."""
    key_at, value_at = as_i64(space.key_at), as_i64(space.value_at)
    for t in range(TILE_TOKENS):
        token = start + min(t, count - 1)
        key_at[t], value_at[t] = k + token * k_stride, v + token * v_stride


@device_function
def attend_rows(cast: Any, size: int, args: Any) -> None:
    q, out, scale = cast(args[1]), cast(args[4]), as_f32(args[5])[0]
    tiles, items, heads, group, head_dim, window = as_i64(args[6]), args[7], args[8], args[9], args[10], args[11]
    q_stride, k_stride, v_stride, out_stride = args[12], size * args[13], size * args[14], args[15]
    memory = memory_for(TILE_ROWS, head_dim)
    space = space_in(memory, TILE_ROWS, head_dim)
    for item in work(args, items):
        tile, head = 4 * (item // heads), item % heads
        first_row, length, first, rows = tiles[tile], tiles[tile + 1], tiles[tile + 2], tiles[tile + 3]
        for r in range(rows):
            begin_query(space, r, cast, q, (first_row + first + r) * q_stride + head * head_dim, head_dim)
            as_i64(space.begins)[r] = max(first + r - window + 1, 0)
            as_i64(space.ends)[r] = min(first + r + window, length)
        k = args[2] + first_row * k_stride + head // group * head_dim * size
        v = args[3] + first_row * v_stride + head // group * head_dim * size
        end = as_i64(space.ends)[rows - 1]
        for start in range(as_i64(space.begins)[0] // TILE_TOKENS * TILE_TOKENS, end, TILE_TOKENS):
            count = min(end - start, TILE_TOKENS)
            find_keys(space, start, count, k, v, k_stride, v_stride)
            attend_tile(
                space, cast, size, 0, 0, rows, start, count, head_dim, 0, 0, 0, 0, scale, np.float32(0.0)
            )  # fmt: skip
        for r in range(rows):
            end_query(space, r, out, (first_row + first + r) * out_stride + head * head_dim, head_dim)
    memory[0] = 0  # Numba frees an array after its last use, and does not see the pointers into it


ATTEND = each_dtype(attend_rows)


def encoder_attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
    """Attend: q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] -> [tokens, heads, head_dim],
    contiguous. Heads are padded with zeros to a multiple of LANES."""
    if rest := -q.shape[2] % LANES:
        q, k, v = (F.pad(x, (0, rest)) for x in (q, k, v))  # zeros change no score
        return encoder_attention(q, k, v, batch, scale, window)[..., :-rest].contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    if batch.tiles is None:
        batch.tiles = row_tiles(batch)
    q, k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (q, k, v))
    heads, items = q.shape[1], len(batch.tiles) * q.shape[1]
    ATTEND.launch(
        q.dtype, items, q, k, v, out, constants(scale), batch.tiles, items, heads, heads // k.shape[1], q.shape[2],
        window or NO_WINDOW, q.stride(0), k.stride(0), v.stride(0), out.stride(0),
    )  # fmt: skip
    return out


def row_tiles(batch: Batch) -> Tensor:
    """Return [tiles, 4] int64: for each tile, its sequence's first row and length, the tile's first row in the
    sequence, and its number of rows."""
    starts = batch.query_start.tolist()
    lengths = [(start, end - start) for start, end in itertools.pairwise(starts)]
    tiles = [(a, n, row, min(TILE_ROWS, n - row)) for a, n in lengths for row in range(0, n, TILE_ROWS)]
    return torch.tensor(tiles, dtype=torch.int64).view(-1, 4)
