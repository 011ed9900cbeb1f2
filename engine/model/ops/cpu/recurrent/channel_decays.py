"""Linear attention whose decays differ between the channels of a key, on a CPU: Kimi Delta Attention.

Names are those of ops/recurrent/linear_attention.py. Sums run as in linear_attention.py in this folder, which
computes heads with one decay; here the products of rows with keys also contain the decays. A tile of up to ROWS rows
begins at a multiple of ROWS in its chunk, and sees earlier rows through the decays at its start. With B the sum of
decays before the tile,

    k_i . k_ij = (k_i * exp(G_i - B)) . (k_j * exp(B - G_j))        for j before the tile

is a product of matrices without an exponent above 0 (arXiv:2510.26692, section 3.2). Within a tile, each pair of rows
is summed up separately.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops.cpu.kernel import CpuKernel, as_f32, as_i64, device_function, exp, kernel, sum_function, work
from engine.model.ops.cpu.recurrent.linear_attention import (
    FEW_ROWS,
    Scratch,
    attend_tile,
    divide_space,
    find_keys,
    launch,
    move_state_rows,
    multiply,
    multiply_keys,
    save_state,
)
from engine.model.ops.cpu.recurrent.sequences import SEQUENCE_BYTES
from engine.model.ops.cpu.tiles.tile_product import ROWS, pack_columns
from engine.model.ops.cpu.vector import CACHE_LINE_BYTES, LANES
from engine.model.state import CHUNK, States


@device_function
def decay_keys(decayed: int, key_at: int, decays: int, last: int, count: int, key_dim: int) -> None:
    """Compute decayed[j] = k_j * exp(G_last - G_j) for j < count."""
    now = as_f32(decays + 4 * last * key_dim)
    for j in range(count):
        target, source = as_f32(decayed + 4 * j * key_dim), as_f32(as_i64(key_at)[j])
        before = as_f32(decays + 4 * j * key_dim)
        for i in range(key_dim):
            target[i] = source[i] * exp(now[i] - before[i])


@sum_function
def multiply_pair(k_i: Any, q_i: Any, k_j: Any, now: Any, before: Any, key_dim: int) -> Any:
    """Return the products of a row's key and query with an earlier key, which decays from `before` to `now`."""
    with_k = with_q = np.float32(0.0)
    for i in range(key_dim):
        seen = k_j[i] * exp(now[i] - before[i])
        with_k += k_i[i] * seen
        with_q += q_i[i] * seen
    return with_k, with_q


@device_function
def multiply_pairs(space: Scratch, first: int, count: int, q: int, stride: int, decays: int, base: int, row: int,
                   rows: int, key_dim: int) -> None:  # fmt: skip
    """Fill `inner` for a tile's rows among themselves. q: address of the queries of its first row."""
    key_at = as_i64(space.key_at)
    for r in range(rows):
        now, k_i, q_i = as_f32(decays + 4 * (row + r) * key_dim), as_f32(key_at[row + r]), as_f32(q + 4 * r * stride)
        of_k = as_f32(space.inner + 4 * (first + r) * CHUNK)
        of_q = as_f32(space.inner + 4 * (count + first + r) * CHUNK)
        for j in range(base, row + r + 1):
            before = as_f32(decays + 4 * j * key_dim)
            of_k[j], of_q[j] = multiply_pair(k_i, q_i, as_f32(key_at[j]), now, before, key_dim)


@device_function
def multiply_tile(space: Scratch, decayed: int, decayed_at: int, tile: int, first: int, count: int, q: int, stride: int,
                  decays: int, row: int, rows: int, key_dim: int) -> None:  # fmt: skip
    """Fill `inner` for the `rows` rows of a tile. The tile begins at `row` of its chunk and at `first` of the `count`
    rows of its portion. decayed: memory for CHUNK keys; decayed_at: addresses of these keys; tile: memory for 2 * ROWS
    rows."""
    base, key_at = row // ROWS * ROWS, as_i64(space.key_at)
    if base:
        decay_keys(decayed, space.key_at, decays, base - 1, base, key_dim)
        before = as_f32(decays + 4 * (base - 1) * key_dim)
        for r in range(rows):
            now, k_i = as_f32(decays + 4 * (row + r) * key_dim), as_f32(key_at[row + r])
            q_i = as_f32(q + 4 * r * stride)
            to_k, to_q = as_f32(tile + 4 * r * key_dim), as_f32(tile + 4 * (rows + r) * key_dim)
            for i in range(key_dim):
                past = exp(now[i] - before[i])
                to_k[i], to_q[i] = past * k_i[i], past * q_i[i]
        packed = 2 * rows > FEW_ROWS
        if packed:
            for t in range(0, base, LANES):
                pack_columns(as_f32(space.keys + 4 * t), CHUNK, as_i64(decayed_at + 8 * t), 0, key_dim)
        if rows == count:  # those of keys and queries lie side by side
            multiply_keys(space.inner, 2 * rows, tile, decayed_at, space.keys, key_dim, base, packed)
        else:
            of_k, of_q = space.inner + 4 * first * CHUNK, space.inner + 4 * (count + first) * CHUNK
            multiply_keys(of_k, rows, tile, decayed_at, space.keys, key_dim, base, packed)
            multiply_keys(of_q, rows, tile + 4 * rows * key_dim, decayed_at, space.keys, key_dim, base, packed)
    multiply_pairs(space, first, count, q, stride, decays, base, row, rows, key_dim)


@device_function
def move_state(space: Scratch, decayed: int, decayed_at: int, decays: int, state: int, values: int, key_dim: int,
               value_dim: int, begun: bool) -> None:  # fmt: skip
    """Decay the state over a whole chunk, and add the chunk's rows."""
    decay_keys(decayed, space.key_at, decays, CHUNK - 1, CHUNK, key_dim)
    for t in range(0, CHUNK, LANES):
        pack_columns(as_f32(space.keys + 4 * t), CHUNK, as_i64(decayed_at + 8 * t), 0, key_dim)
    last, factors = as_f32(decays + 4 * (CHUNK - 1) * key_dim), as_f32(space.factors)
    for i in range(0, key_dim, ROWS):
        for r in range(ROWS):
            factors[r] = exp(last[i + r]) if begun else np.float32(0.0)
        move_state_rows(space, state, values, i, value_dim)
    for r in range(ROWS):
        factors[r] = np.float32(1.0)


@device_function
def add_decays(decays: int, steps: int, stride: int, row: int, end: int, key_dim: int) -> None:
    """Sum up the decays of rows `row` to `end` of a chunk; those of earlier rows are summed up already. steps: address
    of the first row's decays."""
    for j in range(row, end):
        now, step = as_f32(decays + 4 * j * key_dim), as_f32(steps + 4 * (j - row) * stride)
        before = as_f32(decays + 4 * max(j - 1, 0) * key_dim)
        for i in range(key_dim):
            now[i] = step[i] if j == 0 else before[i] + step[i]


@device_function
def read_state(space: Scratch, q: int, stride: int, decays: int, state: int, row: int, count: int, key_dim: int,
               value_dim: int, begun: bool) -> None:  # fmt: skip
    """Fill `read` for the keys and queries of `count` rows of a chunk, from `row` on."""
    if not begun:
        for i in range(2 * count * value_dim):
            as_f32(space.read)[i] = np.float32(0.0)
        return
    key_at, rows = as_i64(space.key_at), as_f32(space.rows)
    for r in range(count):
        now, k_i, q_i = as_f32(decays + 4 * (row + r) * key_dim), as_f32(key_at[row + r]), as_f32(q + 4 * r * stride)
        for i in range(key_dim):
            past = exp(now[i])
            rows[r * key_dim + i], rows[(count + r) * key_dim + i] = past * k_i[i], past * q_i[i]
    multiply(space.read, 2 * count, space.rows, state, key_dim, value_dim)


@kernel
def channel_decay_rows(args: Any) -> None:
    """Attend, item by item. args: as for `linear_attention_rows`, with one decay per channel."""
    seqs, longest = as_i64(args[11])[0], min(as_i64(args[11])[1], CHUNK)
    heads, key_heads, key_dim, value_dim = args[12], args[13], args[14], args[15]
    group, q_stride, v_stride = heads // key_heads, key_heads * key_dim, heads * value_dim
    size = divide_space(0, longest, key_dim, value_dim).end
    memory = np.zeros(size + 4 * (CHUNK + 2 * ROWS) * key_dim + 8 * CHUNK + CACHE_LINE_BYTES, np.uint8)
    start = (memory.ctypes.data + CACHE_LINE_BYTES - 1) // CACHE_LINE_BYTES * CACHE_LINE_BYTES
    space = divide_space(start, longest, key_dim, value_dim)
    decayed = space.end
    tile, decayed_at = decayed + 4 * CHUNK * key_dim, decayed + 4 * (CHUNK + 2 * ROWS) * key_dim
    for j in range(CHUNK):
        as_i64(decayed_at)[j] = decayed + 4 * j * key_dim
    for r in range(ROWS):
        as_f32(space.factors)[r] = np.float32(1.0)
    for item in work(args, seqs * heads):  # space.decays stays 0: what `attend_tile` weighs has its decays already
        seq, head = as_i64(args[11] + SEQUENCE_BYTES * (1 + item // heads)), item % heads
        token, position, slot = seq[0], seq[2], seq[3]
        at = slot * heads + head
        states, values = args[7] + 4 * head * key_dim * value_dim, args[9] + 4 * at * CHUNK * value_dim
        state = states + 4 * slot * args[16]
        kept = args[8] + 4 * (slot * key_heads + head // group) * CHUNK * key_dim
        decays = args[10] + 4 * at * CHUNK * key_dim
        while token < seq[1]:
            row = position % CHUNK
            count = min(CHUNK - row, seq[1] - token)
            end, begun = row + count, position >= CHUNK
            add_decays(decays, args[4] + 4 * (token * heads + head) * key_dim, heads * key_dim, row, end, key_dim)
            q = args[1] + 4 * (token * q_stride + head // group * key_dim)
            k = args[2] + 4 * (token * q_stride + head // group * key_dim)
            find_keys(space, kept, k, q_stride, row, end, key_dim)
            read_state(space, q, q_stride, decays, state, row, count, key_dim, value_dim, begun)
            done = 0
            while done < count:
                some = min(ROWS - (row + done) % ROWS, count - done)
                multiply_tile(
                    space, decayed, decayed_at, tile, done, count, q + 4 * done * q_stride, q_stride, decays,
                    row + done, some, key_dim,
                )  # fmt: skip
                first = (token + done) * v_stride + head * value_dim
                beta = args[5] + 4 * ((token + done) * heads + head) if args[5] else 0
                attend_tile(
                    space, values, args[3] + 4 * first, v_stride, args[6] + 4 * first, beta, heads, done, some,
                    row + done, count, value_dim,
                )  # fmt: skip
                done += some
            token, position = token + count, position + count
            if end == CHUNK:
                move_state(space, decayed, decayed_at, decays, state, values, key_dim, value_dim, begun)
                if position == seq[4]:
                    save_state(state, states + 4 * seq[5] * args[16], key_dim * value_dim)
    memory[0] = 0  # Numba frees an array after its last use, and does not see the pointers into it


CHANNEL_DECAYS = CpuKernel({torch.float32: channel_decay_rows})


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, states: States, batch: Batch, scale: float,
    eps: float | None,
) -> Tensor:  # fmt: skip
    """Attend. q, k: [tokens, k_heads, d_k]; v: [tokens, heads, d_v]; decay: [tokens, heads, d_k]; beta: [tokens,
    heads]. Returns [tokens, heads, d_v] float32."""
    return launch(CHANNEL_DECAYS, q, k, v, decay, beta, states, batch, scale, eps)
