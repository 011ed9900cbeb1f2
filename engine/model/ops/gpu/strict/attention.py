"""Paged attention in which a row has the same bits alone, in any batch and in any chunk, in Triton.

Keys are divided at multiples of SPLIT_TOKENS of the sequence's positions, and each split is summed in tiles that begin
at multiples of BLOCK_N. The results of the splits are merged in ascending order. A tile of rows may be computed by one
program, split after split, or by one program per split, of which the last one merges. Both ways give the same bits, so
the plan can choose either for each batch. A split in which a row sees no key changes nothing in that row, so a row
can share its tile with rows that see more. Every tile has BLOCK_M rows, even to decode, since a GPU's instructions for
fewer rows may sum in another order.

The rest is as in ops/gpu/attention.py. Tile sizes are estimates. Has run under Triton's interpreter only, not on a GPU
yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops.gpu import attention
from engine.model.ops.gpu.attention import (
    LOG2_E,
    PARTIAL_BYTES,
    PLAN_BLOCK,
    add_keys,
    clear_items,
    first_key,
    load_tiles,
    store_items,
)
from engine.model.ops.gpu.rope import rotate_and_write

__all__ = ["paged_attention", "rotate_and_write"]

BLOCK_M = attention.CHUNK_ROWS
SPLIT_TOKENS = 512  # a multiple of the keys of a tile


@triton.jit
def split_tiles(
    tile, count, tiles, single, query_start, kv_len,
    DECODE: tl.constexpr, WINDOW: tl.constexpr, SPLIT_TOKENS: tl.constexpr,
):  # fmt: skip
    """Return the result of `load_tiles`, with `start` moved to the border of a split, and each tile's split count."""
    seq, row, rows, start, end, stop = load_tiles(
        tile, count, tiles, single, query_start, kv_len, kv_len, DECODE, WINDOW, 0, False
    )  # fmt: skip
    start = start // SPLIT_TOKENS * SPLIT_TOKENS
    splits = tl.where(tile < count, tl.maximum(tl.cdiv(end - start, SPLIT_TOKENS), 1), 0)
    return seq, row, rows, start, end, stop, splits


@triton.jit(do_not_specialize=["count", "slots", "max_items"])
def plan_splits_kernel(
    items, tiles, single, query_start, kv_len, count, slots, max_items,
    DECODE: tl.constexpr, WINDOW: tl.constexpr, SPLIT_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Give each tile one program, or one per split if it has more than `most` splits: the smallest power of two with
    which the partial results fit into `slots`. Grid (1). items [max_items, 9]: see `plan_kernel`."""
    most, needed = 1, slots + 1
    while needed > slots:
        needed = 0
        for first in range(0, count, BLOCK):
            tile = first + tl.arange(0, BLOCK)
            _, _, _, _, _, _, splits = split_tiles(
                tile, count, tiles, single, query_start, kv_len, DECODE, WINDOW, SPLIT_TOKENS
            )  # fmt: skip
            needed += tl.sum(tl.where(splits > most, splits, 0), 0)
        most = tl.where(needed > slots, 2 * most, most)
    used, slot = 0, 0
    for first in range(0, count, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        seq, row, rows, start, end, stop, splits = split_tiles(
            tile, count, tiles, single, query_start, kv_len, DECODE, WINDOW, SPLIT_TOKENS
        )  # fmt: skip
        programs = tl.where(splits > most, splits, tl.minimum(splits, 1))
        used, slot = store_items(items, used, slot, seq, row, rows, start, end, stop, programs, SPLIT_TOKENS)
    clear_items(items, used, max_items, BLOCK)


@triton.jit
def merge(acc, total, top, found, found_top):
    """Add `found` [rows, head_dim], the result of a split. found_top: logarithm (base 2) of the sum of its weights."""
    highest = tl.maximum(top, found_top)
    base = tl.where(highest == float("-inf"), 0.0, highest)  # a row that sees no key yet
    weight, shrink = tl.exp2(found_top - base), tl.exp2(top - base)
    return acc * shrink[:, None] + found * weight[:, None], total * shrink + weight, highest


@triton.jit
def divided(acc, total):
    """Return acc / total, exact where the total is 1; 0 where it is 0."""
    return tl.div_rn(acc, tl.broadcast_to(tl.where(total == 0.0, 1.0, total)[:, None], acc.shape))


@triton.jit(do_not_specialize=["table_stride"])
def attend_splits_kernel(
    q, cache, out, partial, partial_top, arrived, items, block_table,
    scale, cap, q_stride, out_stride, block_stride, table_stride,
    GROUP: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_PAD: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
):  # fmt: skip
    """Attend from the tile of each item of the plan. Grid (items, kv_heads). `partial`, `partial_top` and `arrived` are
    as in `attend_kernel`."""
    items += 9 * tl.program_id(0)
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    seq = tl.load(items)
    if seq < 0:
        return
    row, rows, stop = tl.load(items + 1), tl.load(items + 2), tl.load(items + 3)
    begin, end = tl.load(items + 4), tl.load(items + 5)
    slot, programs, program = tl.load(items + 6), tl.load(items + 7), tl.load(items + 8)
    m = tl.arange(0, BLOCK_M)  # rows outside, heads inside
    d = tl.arange(0, HEAD_PAD)
    inside = (m < rows * GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    head = kv_head * GROUP + m % GROUP
    q += tl.cast(row, tl.int64) * q_stride
    query = tl.load(q + (m // GROUP * q_stride + head * HEAD_DIM)[:, None] + d[None, :], mask=inside, other=0.0)
    length = stop - rows + 1 + m // GROUP
    page_size: tl.constexpr = PAGE * HEAD_DIM
    keys = cache + kv_head * page_size
    values = keys + kv_heads * page_size
    table = block_table + tl.cast(seq, tl.int64) * table_stride

    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    seen = first_key(stop, rows, WINDOW, 0) // BLOCK_N * BLOCK_N
    for split in range(begin, end, SPLIT_TOKENS):
        split_acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
        split_total = tl.zeros([BLOCK_M], tl.float32)
        split_top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        for first in range(tl.maximum(split, seen), tl.minimum(split + SPLIT_TOKENS, end), BLOCK_N):
            split_acc, split_total, split_top = add_keys(
                split_acc, split_total, split_top, query, keys, values, table, first, end, length, length, scale, cap,
                block_stride, PAGE, HEAD_DIM, WINDOW, 0, CAPPED, True, BLOCK_N, HEAD_PAD, "tf32",
            )  # fmt: skip
        acc, total, top = merge(
            acc, total, top, divided(split_acc, split_total), split_top + tl.log2(split_total)
        )  # fmt: skip

    target = out + (tl.cast(row, tl.int64) + m // GROUP)[:, None] * out_stride + (head * HEAD_DIM)[:, None] + d[None, :]
    if programs > 1:
        place = ((slot + program) * kv_heads + kv_head) * SLOT_ROWS + m
        tl.store(partial + place[:, None] * HEAD_DIM + d[None, :], acc, mask=inside)
        tl.store(partial_top + place, top, mask=m < rows * GROUP)
        tl.debug_barrier()  # all threads have stored before the arrival is counted
        counter = arrived + slot * kv_heads + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1:
            tl.store(counter, 0)
            combine(
                partial, partial_top, target, slot * kv_heads + kv_head, kv_heads, programs, rows,
                GROUP, HEAD_DIM, HEAD_PAD, SLOT_ROWS, BLOCK_M,
            )  # fmt: skip
    else:
        tl.store(target, divided(acc, total).to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine(
    partial, partial_top, target, first, kv_heads, splits, rows,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, SLOT_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of a tile in the order of keys, exactly as one program that computes all splits would.
    Loads with .cg, which bypasses the L1 cache, since other programs wrote the results."""
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_PAD)
    inside = (m < rows * GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for split in range(0, splits):
        place = (first + split * kv_heads) * SLOT_ROWS + m
        found_top = tl.load(partial_top + place, mask=m < rows * GROUP, other=float("-inf"), cache_modifier=".cg")
        found = tl.load(
            partial + place[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0, cache_modifier=".cg"
        )  # fmt: skip
        acc, total, top = merge(acc, total, top, found, found_top)
    tl.store(target, divided(acc, total).to(target.dtype.element_ty), mask=inside)


def paged_attention(
    q: Tensor, batch: Batch, layer: int, scale: float, window: int | None = None,
    *, softcap: float | None = None, sinks: Tensor | None = None, chunk: int | None = None,
) -> Tensor:  # fmt: skip
    """Attend: q [tokens, heads, head_dim] bfloat16 -> the same shape and dtype, contiguous. No model that
    `fixed_order.check` admits has sinks, chunks or images."""
    assert sinks is None and chunk is None and batch.image_ends is None and batch.kv_scales is None
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = q.shape[1] // batch.kv_cache.shape[3]
    if len(batch.single):
        launch(q, out, batch, layer, scale, window, softcap, batch.single, triton.next_power_of_2(group), decode=True)
    if batch.chunks:
        rows = attention.tile_rows(
            max(c.count for c in batch.chunks), q.shape[1], batch.kv_cache.shape[3], q.shape[2], q.dtype, q.device
        )
        tiles = attention.chunk_tiles(batch, rows)
        slot_rows = triton.next_power_of_2(rows * group)
        launch(q, out, batch, layer, scale, window, softcap, tiles, slot_rows, decode=False)
    return out


def launch(
    q: Tensor, out: Tensor, batch: Batch, layer: int, scale: float, window: int | None, softcap: float | None,
    tiles: Tensor, slot_rows: int, *, decode: bool,
) -> None:  # fmt: skip
    """Attend from the decoding rows, or from all chunks, and write their rows of `out`.

    tiles: `Batch.single` to decode, or from `row_tiles`. slot_rows: most rows of a tile times heads per KV head.
    Fused multiply-adds are off, since both ways of merging must round alike.
    """
    kv_cache = batch.kv_cache
    _, _, _, kv_heads, page, head_dim = kv_cache.shape
    head_pad = max(16, triton.next_power_of_2(head_dim))
    block_n = min(128 if attention.hopper(q.device) else 64, max(16, attention.KEY_TILE_BYTES // (head_pad * 2)))
    longest = triton.cdiv(batch.block_table.shape[1] * page, SPLIT_TOKENS)  # in splits
    wanted = attention.PROGRAMS_PER_PROCESSOR * attention.processors(q.device) // kv_heads
    arrived = attention.counters(q.device)
    room = min(len(arrived) // kv_heads, PARTIAL_BYTES // (kv_heads * slot_rows * head_dim * 4))
    slots = max(1, min(2 * max(wanted, longest), room))
    items = plan(batch, tiles, slots, window or 0, decode=decode)
    partial = torch.empty((slots, kv_heads, slot_rows, head_dim), dtype=torch.float32, device=q.device)
    partial_top = torch.empty((slots, kv_heads, slot_rows), dtype=torch.float32, device=q.device)
    steepness = 1.0 if softcap is None else 2 / softcap  # the kernel's tanh(x) takes e ** 2x
    attend_splits_kernel[len(items), kv_heads](
        q, kv_cache[0, layer], out, partial, partial_top, arrived, items,
        batch.block_table, scale * steepness * LOG2_E, (softcap or 0.0) * LOG2_E,
        q.stride(0), out.stride(0), kv_cache.stride(0), batch.block_table.stride(0),
        GROUP=q.shape[1] // kv_heads, PAGE=page, HEAD_DIM=head_dim, WINDOW=window or 0, CAPPED=softcap is not None,
        SPLIT_TOKENS=SPLIT_TOKENS, BLOCK_M=BLOCK_M, BLOCK_N=block_n, HEAD_PAD=head_pad, SLOT_ROWS=slot_rows,
        num_warps=8, num_stages=attention.NUM_STAGES - 1, enable_fp_fusion=False,
    )  # fmt: skip


def plan(batch: Batch, tiles: Tensor, slots: int, window: int, *, decode: bool) -> Tensor:
    """Return how keys are divided over programs, [tiles + slots, 9] int32: see `plan_splits_kernel`. The first layer
    with this window computes it for all such layers."""
    key = "strict", decode, window
    items = batch.plans.get(key)
    if items is None:
        items = batch.plans[key] = torch.empty((len(tiles) + slots, 9), dtype=torch.int32, device=tiles.device)
        plan_splits_kernel[1,](
            items, tiles, batch.single, batch.query_start, batch.kv_len, len(tiles), slots, len(items),
            DECODE=decode, WINDOW=window, SPLIT_TOKENS=SPLIT_TOKENS, BLOCK=PLAN_BLOCK,
        )  # fmt: skip
    return items
