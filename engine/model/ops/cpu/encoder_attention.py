"""Attention of whole sequences on a CPU, with a running softmax (FlashAttention, arXiv:2205.14135, section 3.1).

The work is divided by heads and rows. Both products are small matrix products of float32 in registers: keys are
transposed into the core's cache, a block at a time. With a window only the keys that some row sees are read.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops.cpu.kernel import (
    Kernel,
    as_bf16,
    as_f32,
    as_i64,
    constants,
    device_function,
    exp,
    kernel,
    load,
    store,
    take,
)
from engine.model.ops.cpu.vector import COLUMNS, LANES, ROWS, exp_of_difference, highest, multiply_tile

TILE_ROWS = 128  # of one head, which read a block of keys while it is in the core's cache
BLOCK_TOKENS = 256
KEY_STRIDE = BLOCK_TOKENS + LANES  # of transposed keys: no power of two, which would map all to the same cache lines
NO_WINDOW = 2**62
LOWEST = np.float32(-1e30)  # a score that counts as none; infinities are not safe under fast math


@device_function
def attend_rows(cast: Any, args: Any) -> None:
    q, k, v, out, numbers = cast(args[1]), cast(args[2]), cast(args[3]), cast(args[4]), as_f32(args[5])
    tiles, items, heads, group, head_dim, window = as_i64(args[6]), args[7], args[8], args[9], args[10], args[11]
    q_stride, k_stride, v_stride, out_stride = args[12], args[13], args[14], args[15]
    width = (head_dim + COLUMNS - 1) // COLUMNS * COLUMNS
    scratch = np.empty((head_dim + ROWS) * KEY_STRIDE + (2 * TILE_ROWS + BLOCK_TOKENS) * width, np.float32)
    tops, totals = np.empty(TILE_ROWS, np.float32), np.empty(TILE_ROWS, np.float32)
    keys = scratch.ctypes.data  # [head_dim, KEY_STRIDE]
    scores = keys + 4 * head_dim * KEY_STRIDE  # [ROWS, KEY_STRIDE]
    values = scores + 4 * ROWS * KEY_STRIDE  # [BLOCK_TOKENS, width]
    queries = values + 4 * BLOCK_TOKENS * width  # [TILE_ROWS, width]
    sums = queries + 4 * TILE_ROWS * width  # [TILE_ROWS, width]
    for i in range(len(scratch)):  # also what is only there to fill whole tiles
        scratch[i] = np.float32(0.0)
    while True:
        item = take(args, 1)
        if item >= items:
            break
        tile, head = 4 * (item // heads), item % heads
        start, length, first, rows = tiles[tile], tiles[tile + 1], tiles[tile + 2], tiles[tile + 3]
        for r in range(rows):
            source = (start + first + r) * q_stride + head * head_dim
            for i in range(head_dim):
                as_f32(queries)[r * width + i] = load(q, source + i) * numbers[0]
            for i in range(width):
                as_f32(sums)[r * width + i] = np.float32(0.0)
            tops[r], totals[r] = LOWEST, np.float32(0.0)
        end = min(first + rows - 1 + window, length)  # past the last key that any row sees
        for block in range(max(first - window + 1, 0) // BLOCK_TOKENS * BLOCK_TOKENS, end, BLOCK_TOKENS):
            count = min(BLOCK_TOKENS, end - block)
            padded = (count + COLUMNS - 1) // COLUMNS * COLUMNS
            for t in range(count):
                token, own = start + block + t, head // group * head_dim
                for i in range(head_dim):
                    as_f32(keys)[i * KEY_STRIDE + t] = load(k, token * k_stride + own + i)
                    as_f32(values)[t * width + i] = load(v, token * v_stride + own + i)
            for row in range(0, rows, ROWS):
                for t in range(0, padded, COLUMNS):
                    multiply_tile(
                        as_f32(scores + 4 * t), KEY_STRIDE, as_f32(queries + 4 * row * width), width,
                        as_f32(keys + 4 * t), KEY_STRIDE, head_dim, False,
                    )  # fmt: skip
                for r in range(min(ROWS, rows - row)):
                    line, place = as_f32(scores + 4 * r * KEY_STRIDE), first + row + r - block
                    for t in range(min(max(place - window + 1, 0), count)):
                        line[t] = LOWEST
                    for t in range(max(min(place + window, count), 0), padded):
                        line[t] = LOWEST
                    top = max(tops[row + r], highest(line, padded))
                    shrink = exp(tops[row + r] - top)
                    totals[row + r] = totals[row + r] * shrink + exp_of_difference(line, padded, top)
                    tops[row + r] = top
                    for i in range(width):
                        as_f32(sums)[(row + r) * width + i] *= shrink
                for i in range(0, width, COLUMNS):
                    multiply_tile(
                        as_f32(sums + 4 * (row * width + i)), width, as_f32(scores), KEY_STRIDE,
                        as_f32(values + 4 * i), width, count, True,
                    )  # fmt: skip
        for r in range(rows):
            factor = np.float32(1.0) / totals[r]
            target = (start + first + r) * out_stride + head * head_dim
            for i in range(head_dim):
                store(out, target + i, as_f32(sums)[r * width + i] * factor)
    scratch[0] = 0.0  # Numba frees an array after its last use, and does not see the pointers into it


@kernel
def attend_bf16(args: Any) -> None:
    attend_rows(as_bf16, args)


@kernel
def attend_f32(args: Any) -> None:
    attend_rows(as_f32, args)


ATTEND = Kernel({torch.bfloat16: attend_bf16, torch.float32: attend_f32})


def encoder_attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
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
    """[tiles, 4] int64: first row and length of a sequence, the first of some of its rows, and their number."""
    starts = batch.query_start.tolist()
    lengths = [(start, end - start) for start, end in itertools.pairwise(starts)]
    tiles = [(a, n, row, min(TILE_ROWS, n - row)) for a, n in lengths for row in range(0, n, TILE_ROWS)]
    return torch.tensor(tiles, dtype=torch.int64).view(-1, 4)
