"""Latent attention over the paged cache in Triton. See `select_latent` in ops/attention.py.

The vector of a token is read once for GROUP heads: the whole vector as their keys, its first `rank` numbers as their
values. Keys are divided over programs as in attention.py, and its plan and its combination are used here. The sizes of
tiles are estimates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops.gpu import attention, dependent_launch
from engine.model.ops.gpu.attention import LOG2_E, MIN_SPLIT_TOKENS, keep_split

GROUP = 16  # most heads of a program; tl.dot needs this many rows
CHUNK_ROWS = 2  # rows of a tile: a row and a head take 512 sums
BLOCK_N = 32


@triton.jit(do_not_specialize=["table_stride"])
def latent_kernel(
    q, cache, out, partial, partial_top, arrived, items, block_table,
    scale, q_stride, out_stride, block_stride, table_stride,
    GROUP: tl.constexpr, PAGE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RANK_PAD: tl.constexpr, ROPE_PAD: tl.constexpr,
    PRECISION: tl.constexpr, SLOT_ROWS: tl.constexpr, COMBINED: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Attend from the tile of each item. Grid (items, heads / GROUP). See `attend_kernel`; a group of heads takes the
    place of a KV head."""
    dependent_launch.begin(DEPENDENT)
    items += 9 * tl.program_id(0)
    part, parts = tl.program_id(1), tl.num_programs(1)
    seq = tl.load(items)
    if seq < 0:
        return
    row, rows, stop = tl.load(items + 1), tl.load(items + 2), tl.load(items + 3)
    begin, end, split = tl.load(items + 4), tl.load(items + 5), tl.load(items + 8)
    m, d, e = tl.arange(0, BLOCK_M), tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    here, head = (m < rows * GROUP)[:, None], part * GROUP + m % GROUP
    q += tl.cast(row, tl.int64) * q_stride
    own = q + (m // GROUP * q_stride + head * (RANK + ROPE))[:, None]
    latent = tl.load(own + d[None, :], mask=here & (d < RANK)[None, :], other=0.0)
    rotated = tl.load(own + RANK + e[None, :], mask=here & (e < ROPE)[None, :], other=0.0)
    length = stop - rows + 1 + m // GROUP
    table = block_table + tl.cast(seq, tl.int64) * table_stride

    acc = tl.zeros([BLOCK_M, RANK_PAD], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for first in range(begin, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        block = tl.load(table + n // PAGE, mask=n < end, other=0)
        token = cache + (block.to(tl.int64) * block_stride + n % PAGE * (RANK + ROPE))[:, None]
        there = (n < end)[:, None]  # what is past the end may be anything, NaN included
        c = tl.load(token + d[None, :], mask=there & (d < RANK)[None, :], other=0.0)
        k = tl.load(token + RANK + e[None, :], mask=there & (e < ROPE)[None, :], other=0.0)
        scores = tl.dot(latent, tl.trans(c), input_precision=PRECISION)
        scores = tl.dot(rotated, tl.trans(k), scores, input_precision=PRECISION) * scale
        scores = tl.where(n[None, :] < tl.minimum(length, end)[:, None], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights, shrink = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(c.dtype), c, acc * shrink[:, None], input_precision=PRECISION)
        top = highest

    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    inside = here & (d < RANK)[None, :]
    out += tl.cast(row, tl.int64) * out_stride
    if SPLIT:
        slot, splits = tl.load(items + 6), tl.load(items + 7)
        if splits > 1:
            keep_split(
                acc, total, top, m, d, inside, partial, partial_top, arrived, out, slot, split, splits, parts, rows,
                part, out_stride, GROUP, RANK, RANK_PAD, SLOT_ROWS, COMBINED,
            )  # fmt: skip
            return
    tl.store(
        out + (m // GROUP * out_stride + head * RANK)[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=inside
    )


def latent_attention(q: Tensor, batch: Batch, layer: int, scale: float, rank: int) -> Tensor:
    """Attend: q [tokens, heads, rank + rope_dim] -> [tokens, heads, rank], contiguous."""
    tokens, heads, _ = q.shape
    q, out = q.contiguous(), torch.empty(tokens, heads, rank, dtype=q.dtype, device=q.device)
    group = min(GROUP, heads & -heads)  # a power of two that divides them
    if len(batch.single):
        launch(q, out, batch, layer, scale, group, batch.single, 1, decode=True)
    if batch.chunks:
        tiles = attention.chunk_tiles(batch, CHUNK_ROWS)
        launch(q, out, batch, layer, scale, group, tiles, CHUNK_ROWS, decode=False)
    return out


def launch(
    q: Tensor, out: Tensor, batch: Batch, layer: int, scale: float, group: int, tiles: Tensor, rows: int, *,
    decode: bool,
) -> None:  # fmt: skip
    """Attend from the rows that decode, or from all chunks, in tiles of `rows` rows."""
    rank, cache, parts = out.shape[2], batch.kv_cache, q.shape[1] // group
    block_m, page = max(16, rows * group), cache.shape[4]
    slot_bytes = parts * block_m * rank * 4
    wanted = attention.PROGRAMS_PER_PROCESSOR * attention.processors(q.device) // parts
    wanted = max(1, min(wanted, attention.PARTIAL_BYTES // slot_bytes // 2))
    items = attention.plan(batch, tiles, wanted, 0, 0, BLOCK_N, decode=decode)
    split = batch.block_table.shape[1] * page > MIN_SPLIT_TOKENS
    partial = partial_top = arrived = out  # not used
    if split:
        partial = torch.empty((2 * wanted, parts, block_m, rank), dtype=torch.float32, device=q.device)
        partial_top = torch.empty((2 * wanted, parts, block_m), dtype=torch.float32, device=q.device)
        arrived = attention.counters(q.device)
    pad = triton.next_power_of_2(rank)
    latent_kernel[len(items), parts](
        q, cache[0, layer], out, partial, partial_top, arrived, items, batch.block_table,
        scale * LOG2_E, q.stride(0), out.stride(0), cache.stride(0), batch.block_table.stride(0),
        GROUP=group, PAGE=page, RANK=rank, ROPE=q.shape[2] - rank, SPLIT=split,
        BLOCK_M=block_m, BLOCK_N=BLOCK_N, RANK_PAD=max(16, pad),
        ROPE_PAD=max(16, triton.next_power_of_2(q.shape[2] - rank)),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        SLOT_ROWS=block_m, COMBINED=max(1, attention.COMBINED_VALUES // (block_m * max(16, pad))),
        num_warps=8 if block_m > 16 else 4, num_stages=2, **dependent_launch.options(q.device),
    )  # fmt: skip
