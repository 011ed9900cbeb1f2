"""Linear attention on a CPU. See ops/recurrent/linear_attention.py for names.

An item of work is one head of one sequence. Sums run over the channels of keys or over rows, in order, in tiles of up
to 8 rows by 32 columns, and never depend on the number of rows (tile_product.py). So a row of a prompt, computed in a
tile, has the same bits as a row that is decoded alone. A decoded row reads the state only once, for its key and its
query together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops.cpu.kernel import (
    CpuKernel,
    TokenCount,
    as_f32,
    as_i64,
    constants,
    device_function,
    each_dtype,
    empty,
    exp,
    kernel,
    load,
    sum_of_squares,
    work,
)
from engine.model.ops.cpu.recurrent.sequences import SEQUENCE_BYTES, sequence_table
from engine.model.ops.cpu.tiles.tile_product import (
    COLUMNS,
    PACK_WORDS,
    ROWS,
    add_product_tile,
    multiply_columns,
    pack_columns,
    product_tile,
    rows_at_once,
)
from engine.model.ops.cpu.vector import CACHE_LINE_BYTES, LANES
from engine.model.state import CHUNK, States

TOKENS = 2  # tokens whose q, k and v a thread widens at a time
FEW_ROWS = 4  # up to this many rows of keys and queries, keys are read in place, not packed


class Scratch(NamedTuple):
    """A thread's memory, as addresses; float32. `rows` holds rows of keys, followed by as many rows of queries."""

    rows: int  #: [2 * rows, d_k]
    read: int  #: [2 * rows, d_v], their products with the state
    inner: int  #: [2 * rows, CHUNK], their products with the chunk's keys
    sums: int  #: [ROWS, d_v]
    keys: int  #: [d_k, CHUNK]
    weights: int  #: [ROWS, CHUNK]
    decays: int  #: [CHUNK]
    factors: int  #: [ROWS]
    key_at: int  #: [CHUNK] int64, addresses of the chunk's keys
    end: int


@device_function
def divide_space(start: int, rows: int, key_dim: int, value_dim: int) -> Scratch:
    read = start + 8 * rows * key_dim
    inner = read + 8 * rows * value_dim
    sums = inner + 8 * rows * CHUNK
    keys = sums + 4 * ROWS * value_dim
    weights = keys + 4 * key_dim * CHUNK
    decays = weights + 4 * ROWS * CHUNK
    factors = decays + 4 * CHUNK
    key_at = factors + CACHE_LINE_BYTES
    return Scratch(start, read, inner, sums, keys, weights, decays, factors, key_at, key_at + 8 * CHUNK)


@device_function
def multiply(out: int, rows: int, a: int, b: int, count: int, width: int) -> None:
    """Compute out[r, c] = sum over i < count of a[r, i] * b[i, c], c < width. Matrices are at addresses and dense."""
    row = 0
    while row < rows:
        some = rows_at_once(rows - row)
        for c in range(0, width, COLUMNS):
            product_tile(
                some, as_f32(out + 4 * (row * width + c)), width, as_f32(a + 4 * row * count), count,
                as_f32(b + 4 * c), width, count,
            )  # fmt: skip
        row += some


@device_function
def multiply_keys(out: int, rows: int, a: int, key_at: int, keys: int, key_dim: int, end: int, packed: bool) -> None:
    """Compute out[r, j] = a[r] . key j, for j < end rounded up to a multiple of COLUMNS. A row of `out` has CHUNK
    numbers. key_at: addresses of the keys. packed: whether `keys` has them side by side."""
    for c in range(0, end, COLUMNS):
        row = 0
        while row < rows:
            some = rows_at_once(rows - row)
            target, source = as_f32(out + 4 * (row * CHUNK + c)), as_f32(a + 4 * row * key_dim)
            if packed:
                product_tile(some, target, CHUNK, source, key_dim, as_f32(keys + 4 * c), CHUNK, key_dim)
            else:
                some = min(some, FEW_ROWS)
                multiply_columns(some, target, CHUNK, source, as_i64(key_at + 8 * c), 0, key_dim)
            row += some


@device_function
def weigh(space: Scratch, r: int, row: int, end: int, inner: int) -> None:
    """Write weights[r, j] = inner[j] * exp(G_row - G_j) for j < end. row: row of the chunk. inner: address of its
    products."""
    weights, decays, products = as_f32(space.weights + 4 * r * CHUNK), as_f32(space.decays), as_f32(inner)
    now = decays[row]
    for j in range(end):
        weights[j] = products[j] * exp(now - decays[j])


@device_function
def add_rows(space: Scratch, r: int, rows: int, values: int, first: int, last: int, value_dim: int) -> None:
    """Add to sums[r + i]: the sum over first <= j < last of weights[r + i, j] * values[j], for i < rows."""
    if last <= first:
        return
    for c in range(0, value_dim, COLUMNS):
        add_product_tile(
            rows, as_f32(space.sums + 4 * (r * value_dim + c)), value_dim, as_f32(space.factors),
            as_f32(space.weights + 4 * (r * CHUNK + first)), CHUNK, as_f32(values + 4 * (first * value_dim + c)),
            value_dim, last - first,
        )  # fmt: skip


@device_function
def sum_before(space: Scratch, rows: int, first: int, values: int, value_dim: int) -> None:
    """Set sums, for `rows` rows, to the weighted sums of values over the chunk's rows before `first`."""
    sums = as_f32(space.sums)
    for i in range(rows * value_dim):
        sums[i] = np.float32(0.0)
    r = 0
    while r < rows:
        some = rows_at_once(rows - r)
        add_rows(space, r, some, values, 0, first, value_dim)
        r += some


@device_function
def attend_tile(
    space: Scratch, values: int, v: int, v_stride: int, out: int, beta: int, beta_stride: int, first: int, rows: int,
    row: int, count: int, value_dim: int,
) -> None:  # fmt: skip
    """Compute u and o of `rows` rows, from `row` of the chunk on; they must not cross a multiple of ROWS. first: index
    of the first row among the `count` rows of the portion. v, out, beta: addresses for that row; beta is 0 for none."""
    base, sums, decays = row // ROWS * ROWS, as_f32(space.sums), as_f32(space.decays)
    if beta:
        for r in range(rows):
            weigh(space, r, row + r, row + r, space.inner + 4 * (first + r) * CHUNK)
        sum_before(space, rows, base, values, value_dim)
    for r in range(rows):
        u, source = as_f32(values + 4 * (row + r) * value_dim), as_f32(v + 4 * r * v_stride)
        if beta:
            add_rows(space, r, 1, values, base, row + r, value_dim)
            share, past = as_f32(beta)[r * beta_stride], exp(decays[row + r])
            known = as_f32(space.read + 4 * (first + r) * value_dim)
            for i in range(value_dim):
                u[i] = share * (source[i] - past * known[i] - sums[r * value_dim + i])
        else:
            for i in range(value_dim):
                u[i] = source[i]
    for r in range(rows):
        weigh(space, r, row + r, row + r + 1, space.inner + 4 * (count + first + r) * CHUNK)
    sum_before(space, rows, base, values, value_dim)
    for r in range(rows):
        add_rows(space, r, 1, values, base, row + r + 1, value_dim)
        past, known = exp(decays[row + r]), as_f32(space.read + 4 * (count + first + r) * value_dim)
        target = as_f32(out + 4 * r * v_stride)
        for i in range(value_dim):
            target[i] = past * known[i] + sums[r * value_dim + i]


@device_function
def move_state_rows(space: Scratch, state: int, values: int, first: int, value_dim: int) -> None:
    """Scale ROWS rows of the state, from `first` on, by `factors`, and add the products of `keys` and values."""
    keys, rows = as_f32(space.keys + 4 * first * CHUNK), state + 4 * first * value_dim
    for c in range(0, value_dim, COLUMNS):
        add_product_tile(
            ROWS, as_f32(rows + 4 * c), value_dim, as_f32(space.factors), keys, CHUNK, as_f32(values + 4 * c),
            value_dim, CHUNK,
        )  # fmt: skip


@device_function
def save_state(state: int, to: int, numbers: int) -> None:
    for i in range(numbers):
        as_f32(to)[i] = as_f32(state)[i]


@device_function
def move_state(space: Scratch, state: int, values: int, key_dim: int, value_dim: int, begun: bool) -> None:
    """Decay the state over a full chunk, and add the chunk's rows. `keys` holds their keys, which are decayed in
    place."""
    decays, last = as_f32(space.decays), as_f32(space.decays)[CHUNK - 1]
    for i in range(key_dim):
        keys = as_f32(space.keys + 4 * i * CHUNK)
        for j in range(CHUNK):
            keys[j] *= exp(last - decays[j])
    factors = as_f32(space.factors)
    for r in range(ROWS):
        factors[r] = exp(last) if begun else np.float32(0.0)
    for i in range(0, key_dim, ROWS):
        move_state_rows(space, state, values, i, value_dim)
    for r in range(ROWS):
        factors[r] = np.float32(1.0)


@device_function
def find_keys(space: Scratch, kept: int, new: int, stride: int, row: int, end: int, key_dim: int) -> None:
    """Set the addresses of a chunk's keys: kept keys before `row`, new keys up to `end`, and after these the last key
    again."""
    key_at = as_i64(space.key_at)
    for j in range(row):
        key_at[j] = kept + 4 * j * key_dim
    for j in range(row, CHUNK):
        key_at[j] = new + 4 * (min(j, end - 1) - row) * stride


@kernel
def linear_attention_rows(args: Any) -> None:
    """Attend, item by item. args: q, k, v, decay, beta, out, state, keys, values, decays, table of sequences, heads,
    k_heads, d_k, d_v, stride from slot to slot of `state` in numbers."""
    seqs, longest = as_i64(args[11])[0], min(as_i64(args[11])[1], CHUNK)
    heads, key_heads, key_dim, value_dim = args[12], args[13], args[14], args[15]
    group, q_stride, v_stride = heads // key_heads, key_heads * key_dim, heads * value_dim
    memory = np.zeros(divide_space(0, longest, key_dim, value_dim).end + CACHE_LINE_BYTES, np.uint8)
    start = memory.ctypes.data
    space = divide_space(
        (start + CACHE_LINE_BYTES - 1) // CACHE_LINE_BYTES * CACHE_LINE_BYTES, longest, key_dim, value_dim
    )
    for r in range(ROWS):
        as_f32(space.factors)[r] = np.float32(1.0)
    for item in work(args, seqs * heads):
        seq, head = as_i64(args[11] + SEQUENCE_BYTES * (1 + item // heads)), item % heads
        token, position, slot = seq[0], seq[2], seq[3]
        at = slot * heads + head
        states, values = args[7] + 4 * head * key_dim * value_dim, args[9] + 4 * at * CHUNK * value_dim
        state = states + 4 * slot * args[16]
        kept = args[8] + 4 * (slot * key_heads + head // group) * CHUNK * key_dim
        sums_of_decays, decays = as_f32(args[10] + 4 * at * CHUNK), as_f32(space.decays)
        while token < seq[1]:
            row = position % CHUNK
            count = min(CHUNK - row, seq[1] - token)
            end, begun = row + count, position >= CHUNK
            for j in range(row):
                decays[j] = sums_of_decays[j]
            for j in range(row, end):
                step = as_f32(args[4])[(token + j - row) * heads + head]
                decays[j] = step if j == 0 else decays[j - 1] + step
                sums_of_decays[j] = decays[j]
            q = args[1] + 4 * (token * q_stride + head // group * key_dim)
            k = args[2] + 4 * (token * q_stride + head // group * key_dim)
            rows = as_f32(space.rows)
            for r in range(count):
                for i in range(key_dim):
                    rows[r * key_dim + i] = as_f32(k)[r * q_stride + i]
                    rows[(count + r) * key_dim + i] = as_f32(q)[r * q_stride + i]
            if begun:
                multiply(space.read, 2 * count, space.rows, state, key_dim, value_dim)
            else:
                for i in range(2 * count * value_dim):
                    as_f32(space.read)[i] = np.float32(0.0)
            find_keys(space, kept, k, q_stride, row, end, key_dim)
            if 2 * count > FEW_ROWS or end == CHUNK:
                for t in range(0, CHUNK, LANES):
                    pack_columns(as_f32(space.keys + 4 * t), CHUNK, as_i64(space.key_at + 8 * t), 0, key_dim)
            packed = 2 * count > FEW_ROWS
            multiply_keys(space.inner, 2 * count, space.rows, space.key_at, space.keys, key_dim, end, packed)
            done = 0
            while done < count:
                some = min(ROWS - (row + done) % ROWS, count - done)
                first = (token + done) * v_stride + head * value_dim
                beta = args[5] + 4 * ((token + done) * heads + head) if args[5] else 0
                attend_tile(
                    space, values, args[3] + 4 * first, v_stride, args[6] + 4 * first, beta, heads, done, some,
                    row + done, count, value_dim,
                )  # fmt: skip
                done += some
            token, position = token + count, position + count
            if end == CHUNK:
                move_state(space, state, values, key_dim, value_dim, begun)
                if position == seq[4]:
                    save_state(state, states + 4 * seq[5] * args[16], key_dim * value_dim)
    memory[0] = 0  # Numba frees an array after its last use, and does not see the pointers into it


LINEAR_ATTENTION = CpuKernel({torch.float32: linear_attention_rows})


@device_function
def widen_head(as_x: Any, x: int, first: int, out: int, size: int, scale: float, eps: float) -> None:
    """Write x[first : first + size] times `scale` as float32, first scaled to unit length unless `eps` is below 0."""
    if eps >= np.float32(0.0):
        scale /= np.sqrt(sum_of_squares(as_x(x), first, size) + eps)
    for i in range(size):
        as_f32(out)[i] = load(as_x(x), first + i) * scale


@device_function
def widen_rows(as_x: Any, args: Any) -> None:
    """Write q, k and v as float32, dense. args: q, k, v, the results for these, `scale` of q and `eps`,
    tokens, three strides from token to token, k_heads, d_k, heads * d_v; v may be 0 for none."""
    numbers, tokens, key_heads, key_dim, width = as_f32(args[7]), args[8], args[12], args[13], args[14]
    for token in work(args, tokens, TOKENS):
        for head in range(key_heads):
            at, target = head * key_dim, 4 * (token * key_heads + head) * key_dim
            widen_head(as_x, args[1], token * args[9] + at, args[4] + target, key_dim, numbers[0], numbers[1])
            widen_head(as_x, args[2], token * args[10] + at, args[5] + target, key_dim, np.float32(1.0), numbers[1])
        if args[3]:
            target = args[6] + 4 * token * width
            widen_head(as_x, args[3], token * args[11], target, width, np.float32(1.0), np.float32(-1.0))


WIDEN = each_dtype(widen_rows)


@kernel
def keep_key_rows(args: Any) -> None:
    """Keep the keys since the last border of each sequence. args: k, keys, table of sequences, k_heads, d_k."""
    seqs, key_heads, key_dim = as_i64(args[3])[0], args[4], args[5]
    for item in work(args, seqs * key_heads):
        seq, head = as_i64(args[3] + SEQUENCE_BYTES * (1 + item // key_heads)), item % key_heads
        tokens = seq[1] - seq[0]
        end = seq[2] + tokens
        kept = args[2] + 4 * (seq[3] * key_heads + head) * CHUNK * key_dim
        for back in range(1, min(tokens, end % CHUNK) + 1):
            source = as_f32(args[1] + 4 * ((seq[1] - back) * key_heads + head) * key_dim)
            target = as_f32(kept + 4 * ((end - back) % CHUNK) * key_dim)
            for i in range(key_dim):
                target[i] = source[i]


KEEP_KEYS = CpuKernel({torch.float32: keep_key_rows})


def supports(key_dim: int, value_dim: int) -> bool:
    return key_dim % PACK_WORDS == 0 and value_dim % COLUMNS == 0


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, states: States, batch: Batch, scale: float,
    eps: float | None,
) -> Tensor:  # fmt: skip
    """Attend. q, k: [tokens, k_heads, d_k]; v: [tokens, heads, d_v]; decay: [tokens, heads, 1]; beta: [tokens, heads].
    Returns [tokens, heads, d_v] float32."""
    return launch(LINEAR_ATTENTION, q, k, v, decay, beta, states, batch, scale, eps)


def launch(
    kernel: CpuKernel, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, states: States,
    batch: Batch, scale: float, eps: float | None,
) -> Tensor:  # fmt: skip
    """Attend by `kernel`: the kernel for heads with one decay, or the kernel for decays of channels."""
    q, k, v = widen(q, k, v, scale, eps)
    (_, heads, value_dim), (key_heads, key_dim) = v.shape, k.shape[1:]
    table, out = sequence_table(batch), empty(v.shape, torch.float32)
    kernel.launch(
        torch.float32, (len(table) - 1) * heads, q, k, v, decay.contiguous(), 0 if beta is None else beta.contiguous(),
        out, states["state"], states["keys"], states["values"], states["decays"], table, heads, key_heads, key_dim,
        value_dim, states["state"].stride(0),
    )  # fmt: skip
    # last, since all heads must have read the keys that these replace
    KEEP_KEYS.launch(torch.float32, (len(table) - 1) * key_heads, k, states["keys"], table, key_heads, key_dim)
    return out


def widen(q: Tensor, k: Tensor, v: Tensor, scale: float, eps: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q times `scale`, k and v in float32, dense; q and k scaled to unit length unless `eps` is None."""
    q, k, v = (x if x[:1].is_contiguous() else x.contiguous() for x in (q, k, v))
    if wide := v.dtype == torch.float32:
        v = v.contiguous()
    outs = [empty(x.shape, torch.float32) for x in ((q, k) if wide else (q, k, v))]
    WIDEN.launch(
        q.dtype, -(-len(q) // TOKENS), q, k, 0 if wide else v, outs[0], outs[1], 0 if wide else outs[2],
        constants(scale, -1.0 if eps is None else eps), TokenCount(len(q)), q.stride(0), k.stride(0), v.stride(0),
        k.shape[1], k.shape[2], v.shape[1] * v.shape[2],
    )  # fmt: skip
    return outs[0], outs[1], v if wide else outs[2]
