"""Linear attention in Triton, for decays of heads and of channels, with and without the delta rule. See
ops/recurrent/linear_attention.py, whose names are used here.

A program computes some channels of one head's values for one sequence, chunk by chunk. It takes a chunk's rows in tiles
that begin at multiples of ROWS. A prompt can compute all rows of a tile, and a decoded token only one, but the products
have the same shapes, so a row's sums have the same order in any batch. In a tile the triangular system is solved row by
row. Exponents are never positive: for a tile's rows, decays are summed from the tile's beginning; for earlier keys, up
to it.

`decays` holds the decays of single rows, not their sums. The sizes of its tiles are estimates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops.gpu import dependent_launch
from engine.model.state import CHUNK, States

ROWS = 16  # tl.dot wants as many at least
VALUES = 32  # channels of values of a program; with more, a state does not fit into its registers


@triton.jit
def load_rows(kept, new, stride, m, d, row, stop, eps, SIZE: tl.constexpr, UNIT: tl.constexpr):
    """Return rows m of a chunk [len(m), len(d)] float32. Those before `row` are from `kept`; the others are the step's,
    from `new` on, and with UNIT divided by their lengths. Rows from `stop` on are 0."""
    inside = (d < SIZE)[None, :]
    old = tl.load(kept + m[:, None] * SIZE + d[None, :], mask=(m < row)[:, None] & inside, other=0.0)
    place = (m - row).to(tl.int64)[:, None] * stride + d[None, :]
    fresh = tl.load(new + place, mask=((m >= row) & (m < stop))[:, None] & inside, other=0.0).to(tl.float32)
    if UNIT:
        fresh *= tl.rsqrt(tl.sum(fresh * fresh, 1) + eps)[:, None]
    return old + fresh


@triton.jit
def linear_attention_kernel(
    q, k, v, decay, beta, out, state, keys, values, decays, query_start, kv_len, slots, save_at, save_slots,
    scale, eps, q_stride, q_head, k_stride, k_head, v_stride, v_head, state_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DECAY_DIM: tl.constexpr, DELTA: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUES: tl.constexpr, DECAY_PAD: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Grid (seqs, HEADS, VALUE_DIM / VALUES). Writes the keys and decays of sequences whose rows are in one chunk.
    `keep_kernel` writes those of the other sequences, because they overwrite data that other programs may still
    read."""
    dependent_launch.begin(DEPENDENT)
    seq, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(query_start + seq), tl.load(kv_len + seq)
    if end == 0:
        return
    start = end - tl.load(query_start + seq + 1) + first
    slot, key_head = tl.load(slots + seq).to(tl.int64), head // GROUP
    c, d, g = tl.arange(0, KEY_PAD), tl.arange(0, VALUES), tl.arange(0, DECAY_PAD)
    j, r = tl.arange(0, CHUNK), tl.arange(0, ROWS)
    d_inside = (part * VALUES + d < VALUE_DIM)[None, :]
    step = first.to(tl.int64)
    q += step * q_stride + key_head * q_head
    k += step * k_stride + key_head * k_head
    v += step * v_stride + head * v_head + part * VALUES
    decay += (step * HEADS + head) * DECAY_DIM
    beta += step * HEADS + head
    out += (step * HEADS + head) * VALUE_DIM + part * VALUES
    keys += (slot * (HEADS // GROUP) + key_head) * CHUNK * KEY_DIM
    values += (slot * HEADS + head) * CHUNK * VALUE_DIM + part * VALUES
    decays += (slot * HEADS + head) * CHUNK * DECAY_DIM
    of_head = head * KEY_DIM * VALUE_DIM + part * VALUES
    in_state = of_head + c[:, None] * VALUE_DIM + d[None, :]
    in_bounds = (c < KEY_DIM)[:, None] & d_inside
    s = tl.load(state + slot * state_stride + in_state, mask=in_bounds & (start >= CHUNK), other=0.0)
    first_chunk, last_chunk = start // CHUNK, (end - 1) // CHUNK

    for chunk in range(first_chunk, last_chunk + 1):
        row, stop = tl.maximum(start - chunk * CHUNK, 0), tl.minimum(end - chunk * CHUNK, CHUNK)
        new = (chunk * CHUNK + row - start).to(tl.int64)  # the step's row that is `row` of the chunk
        new_q, new_k, new_decay = q + new * q_stride, k + new * k_stride, decay + new * HEADS * DECAY_DIM
        all_k = load_rows(keys, new_k, k_stride, j, c, row, stop, eps, KEY_DIM, UNIT)
        all_steps = load_rows(decays, new_decay, HEADS * DECAY_DIM, j, g, row, stop, eps, DECAY_DIM, False)
        sums = tl.cumsum(all_steps, 0)
        for base in range(row // ROWS * ROWS, stop, ROWS):
            m = base + r
            is_new = (m >= row) & (m < stop)
            mine = is_new[:, None] & d_inside
            tile_k = load_rows(keys, new_k, k_stride, m, c, row, stop, eps, KEY_DIM, UNIT)
            # rows before `row` are meaningless
            tile_q = load_rows(keys, new_q, q_stride, m, c, row, stop, eps, KEY_DIM, UNIT)
            steps = load_rows(decays, new_decay, HEADS * DECAY_DIM, m, g, row, stop, eps, DECAY_DIM, False)
            within, at_base = tl.cumsum(steps, 0), tl.sum(tl.where((j == base - 1)[:, None], sums, 0.0), 0)[None, :]
            before = tl.where((j < base)[:, None], all_k * tl.exp(at_base - sums), 0.0)
            told = tl.load(
                values + j[:, None] * VALUE_DIM + d[None, :], mask=(j < base)[:, None] & d_inside, other=0.0
            )  # fmt: skip
            past_s = s * tl.trans(tl.exp(at_base))
            tile_q *= scale
            late_q, late_k = tile_q * tl.exp(within), tile_k * tl.exp(within)
            keys_before = tl.trans(before)
            o = tl.dot(late_q, past_s, input_precision="tf32x3")
            weights = tl.dot(late_q, keys_before, input_precision="tf32x3")
            o += tl.dot(weights, told, input_precision="tf32x3")
            new_rows = (new + m - row).to(tl.int64)[:, None]
            u = tl.load(v + new_rows * v_stride + d[None, :], mask=mine, other=0.0).to(tl.float32)
            share = tl.zeros([ROWS], tl.float32)
            if DELTA:
                share = tl.load(beta + (new + m - row) * HEADS, mask=is_new, other=0.0)
                known = tl.dot(late_k, past_s, input_precision="tf32x3")
                weights = tl.dot(late_k, keys_before, input_precision="tf32x3")
                u = share[:, None] * (u - known - tl.dot(weights, told, input_precision="tf32x3"))
            in_values = values + m[:, None] * VALUE_DIM + d[None, :]
            u += tl.load(in_values, mask=(m < row)[:, None] & d_inside, other=0.0)
            for i in range(tl.maximum(row - base, 0), tl.minimum(stop - base, ROWS)):  # the other rows stay as they are
                this = (r == i)[:, None]
                now = tl.sum(tl.where(this, within, 0.0), 0)[None, :]
                seen_k = tl.where((r <= i)[:, None], tile_k * tl.exp(now - within), 0.0)
                if DELTA:
                    own_k = tl.sum(tl.where(this, tile_k, 0.0), 0)[None, :]
                    weight = tl.where(r < i, tl.sum(seen_k * own_k, 1), 0.0)
                    told_here = tl.sum(weight[:, None] * u, 0)[None, :]
                    u = tl.where(this & is_new[:, None], u - share[:, None] * told_here, u)
                own_q = tl.sum(tl.where(this, tile_q, 0.0), 0)[None, :]
                weight = tl.sum(seen_k * own_q, 1)
                o += tl.where(this, tl.sum(weight[:, None] * u, 0)[None, :], 0.0)
            tl.store(in_values, u, mask=mine)
            tl.store(out + new_rows * HEADS * VALUE_DIM + d[None, :], o.to(out.dtype.element_ty), mask=mine)
            tl.debug_barrier()  # other threads of this program load what was stored
        if stop == CHUNK:
            u = tl.load(values + j[:, None] * VALUE_DIM + d[None, :], mask=(j < CHUNK)[:, None] & d_inside, other=0.0)
            at_end = tl.sum(tl.where((j == CHUNK - 1)[:, None], sums, 0.0), 0)[None, :]
            added = tl.dot(tl.trans(all_k * tl.exp(at_end - sums)), u, input_precision="tf32x3")
            s = s * tl.trans(tl.exp(at_end)) + added
            if (chunk + 1) * CHUNK == tl.load(save_at + seq):
                saved = state + tl.load(save_slots + seq).to(tl.int64) * state_stride
                tl.store(saved + in_state, s, mask=in_bounds)
            tl.debug_barrier()  # the next chunk's values take the places of these
        if (first_chunk == last_chunk) & (part == 0):
            kept = ((j >= row) & (j < stop))[:, None]
            tl.store(decays + j[:, None] * DECAY_DIM + g[None, :], all_steps, mask=kept & (g < DECAY_DIM)[None, :])
            kept = kept & (head % GROUP == 0) & (c < KEY_DIM)[None, :]
            tl.store(keys + j[:, None] * KEY_DIM + c[None, :], all_k, mask=kept)
    if end // CHUNK > first_chunk:
        tl.store(state + slot * state_stride + in_state, s, mask=in_bounds)


@triton.jit
def keep_kernel(
    k, decay, keys, decays, query_start, kv_len, slots, eps, k_stride, k_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, DECAY_DIM: tl.constexpr, UNIT: tl.constexpr,
    CHUNK: tl.constexpr, KEY_PAD: tl.constexpr, DECAY_PAD: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Grid (seqs, HEADS). For each sequence that passed a border in this step, writes the keys and decays after the
    last one."""
    dependent_launch.begin(DEPENDENT)
    seq, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(query_start + seq), tl.load(kv_len + seq)
    start = end - tl.load(query_start + seq + 1) + first
    stop = end % CHUNK
    if (end == 0) | (start // CHUNK == (end - 1) // CHUNK) | (stop == 0):
        return
    slot, key_head = tl.load(slots + seq).to(tl.int64), head // GROUP
    new = (first + end - stop - start).to(tl.int64)
    j, c, g = tl.arange(0, CHUNK), tl.arange(0, KEY_PAD), tl.arange(0, DECAY_PAD)
    decay += (new * HEADS + head) * DECAY_DIM
    decays += (slot * HEADS + head) * CHUNK * DECAY_DIM
    steps = load_rows(decays, decay, HEADS * DECAY_DIM, j, g, 0, stop, eps, DECAY_DIM, False)
    tl.store(decays + j[:, None] * DECAY_DIM + g[None, :], steps, mask=(j < stop)[:, None] & (g < DECAY_DIM)[None, :])
    if head % GROUP == 0:
        keys += (slot * (HEADS // GROUP) + key_head) * CHUNK * KEY_DIM
        rows = load_rows(keys, k + new * k_stride + key_head * k_head, k_stride, j, c, 0, stop, eps, KEY_DIM, UNIT)
        tl.store(keys + j[:, None] * KEY_DIM + c[None, :], rows, mask=(j < stop)[:, None] & (c < KEY_DIM)[None, :])


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, states: States, batch: Batch, scale: float,
    eps: float | None,
) -> Tensor:  # fmt: skip
    """q, k: [tokens, k_heads, d_k]; v: [tokens, heads, d_v]; decay: [tokens, heads, 1 or d_k]; beta: [tokens, heads].
    Returns [tokens, heads, d_v] of v's dtype."""
    assert batch.states is not None
    found, (tokens, heads, value_dim), (key_heads, key_dim) = batch.states, v.shape, k.shape[1:]
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    decay, share = decay.contiguous(), decay if beta is None else beta.contiguous()
    out = torch.empty(tokens, heads, value_dim, dtype=v.dtype, device=v.device)
    pad = max(16, triton.next_power_of_2(key_dim))
    sizes = {
        "HEADS": heads, "GROUP": heads // key_heads, "KEY_DIM": key_dim, "DECAY_DIM": decay.shape[2],
        "UNIT": eps is not None, "CHUNK": CHUNK, "KEY_PAD": pad, "DECAY_PAD": 1 if decay.shape[2] == 1 else pad,
    }  # fmt: skip
    block = min(VALUES, max(16, triton.next_power_of_2(value_dim)))
    rows = states["keys"], states["values"], states["decays"]
    where = batch.query_start, batch.kv_len, found.slots
    linear_attention_kernel[len(batch.kv_len), heads, triton.cdiv(value_dim, block)](
        q, k, v, decay, share, out, states["state"], *rows, *where, found.save_at, found.save_slots, scale, eps or 0.0,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], states["state"].stride(0),
        **sizes, VALUE_DIM=value_dim, DELTA=beta is not None, ROWS=ROWS, VALUES=block, num_warps=8,
        **dependent_launch.options(v.device),
    )  # fmt: skip
    if batch.chunks:
        keep_kernel[len(batch.kv_len), heads](
            k, decay, states["keys"], states["decays"], *where, eps or 0.0, *k.stride()[:2], **sizes,
            **dependent_launch.options(v.device),
        )  # fmt: skip
    return out
