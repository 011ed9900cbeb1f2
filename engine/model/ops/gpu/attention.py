"""Paged attention in Triton: one kernel for rows that decode and for chunks of prompts. See ops/attention.py;
`rotate_and_write` is in rope.py.

A program computes a tile of rows of one sequence for all query heads that share one KV head, so that K and V are read
once for all these heads. It goes through the keys with a running softmax (FlashAttention-2, arXiv:2307.08691). Keys are
also split over programs (Flash-Decoding, https://pytorch.org/blog/flash-decoding, 2023), by the length of each
sequence, so that even one long sequence among short ones uses the whole GPU. `plan_kernel` divides them on the device,
once for all layers of a kind. The last program of a tile to finish combines the results of all.

The kernels can be part of CUDA graphs: the grid and every argument depend only on shapes, and lengths are read on the
device. Padding of a batch consists of sequences with kv_len 0, whose output is 0, and of sequence numbers -1 and tiles
without rows, for which nothing is written. Results depend, in the last bits, on where keys are split and so on the
other sequences of the batch. Tile sizes are estimates.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.devices.device import copy_to
from engine.model.batch import Batch, row_tiles
from engine.model.ops.gpu import dependent_launch

LOG2_E = math.log2(math.e)
CHUNK_ROWS, SMALL_CHUNK_ROWS, DECODE_ROWS = 128, 32, 16  # rows x heads of a tile; tl.dot needs at least 16
SMALL_HEAD_DIM = 128
KEY_TILE_BYTES = 16 * 1024  # K, and as much V, in each stage of a pipeline in shared memory
NUM_STAGES = 5  # keeps three tiles in flight, not five, since a block's id is loaded before its K and V
PROGRAMS_PER_PROCESSOR = 4  # enough to keep the memory busy
DECODE_PROGRAMS = 12  # likewise for decode steps; three run at a time, so that processors end at about the same time
MIN_SPLIT_TOKENS = 256  # fewest keys of a split: with fewer, starting its program costs too much
PLAN_BLOCK = 256  # tiles that are planned at a time
COMBINED_VALUES = 8192  # values of partial results that a program holds at a time
PARTIAL_BYTES = 64 << 20
INTERPRETED_PROCESSORS = 8


@triton.jit
def first_key(stop, rows, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first key that any row of a tile sees. stop: end of the keys of the tile's last row. WINDOW, CHUNK: 0
    if there is none."""
    all_see = stop - rows + 1  # keys that every row sees
    start = tl.zeros_like(stop)
    if WINDOW:
        start = tl.maximum(all_see - WINDOW, 0)
    if CHUNK:
        start = tl.maximum(tl.maximum(all_see - 1, 0) // CHUNK * CHUNK, start)
    return start


@triton.jit
def load_tiles(
    tile, count, tiles, single, query_start, kv_len, span_ends,
    DECODE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, IMAGES: tl.constexpr,
):  # fmt: skip
    """Return each tile's sequence, first row, row count, keys [start, end), and `stop`: their end without images."""
    here = tile < count
    if DECODE:
        seq = tl.load(single + tile, mask=here, other=-1)
        rows = (seq >= 0).to(tl.int32)  # -1 is padding
        seq = tl.maximum(seq, 0)
        row = tl.load(query_start + seq, mask=here, other=0)
        after = tl.zeros_like(seq)
    else:
        seq = tl.load(tiles + 4 * tile, mask=here, other=0)
        row = tl.load(tiles + 4 * tile + 1, mask=here, other=0)
        rows = tl.load(tiles + 4 * tile + 2, mask=here, other=0)
        after = tl.load(tiles + 4 * tile + 3, mask=here, other=0)
    stop = tl.where(rows > 0, tl.load(kv_len + seq, mask=here, other=0) - after, 0)
    start, end = first_key(stop, rows, WINDOW, CHUNK), stop
    if IMAGES:
        end = tl.maximum(end, tl.load(span_ends + row + rows - 1, mask=rows > 0, other=0))
    return seq, row, rows, start, end, stop


@triton.jit(do_not_specialize=["count", "wanted", "max_items"])
def plan_kernel(
    items, tiles, single, query_start, kv_len, span_ends, count, wanted, max_items,
    DECODE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, IMAGES: tl.constexpr, BLOCK_N: tl.constexpr,
    MIN_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Divide the keys of `count` tiles into about `wanted` equal parts (items) that do not cross tiles. Grid (1).

    items [max_items, 9]: sequence, first row, number of rows, stop (see `load_tiles`), begin and end of the item's
    keys, first slot for the tile's partial results, number of the tile's splits, index of this split. Surplus items
    have sequence -1.
    """
    total = 0
    for first in range(0, count, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        _, _, _, start, end, _ = load_tiles(
            tile, count, tiles, single, query_start, kv_len, span_ends, DECODE, WINDOW, CHUNK, IMAGES
        )  # fmt: skip
        total += tl.sum(end - start, 0)
    split_tokens = tl.cdiv(tl.maximum(tl.cdiv(total, wanted), MIN_TOKENS), BLOCK_N) * BLOCK_N
    used, slots = 0, 0
    for first in range(0, count, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        seq, row, rows, start, end, stop = load_tiles(
            tile, count, tiles, single, query_start, kv_len, span_ends, DECODE, WINDOW, CHUNK, IMAGES
        )  # fmt: skip
        splits = tl.where(tile < count, tl.maximum(tl.cdiv(end - start, split_tokens), 1), 0)
        used, slots = store_items(items, used, slots, seq, row, rows, start, end, stop, splits, split_tokens)
    clear_items(items, used, max_items, BLOCK)


@triton.jit
def store_items(items, used, slots, seq, row, rows, start, end, stop, splits, split_tokens):
    """Write the items of some tiles after the first `used` items. splits: items of each tile. An item has
    `split_tokens` keys; the only item of a tile has all its keys. Return the new numbers of items and of used slots."""
    slotted = tl.where(splits > 1, splits, 0)
    item = items + 9 * (used + tl.cumsum(splits, 0) - splits)
    slot = slots + tl.cumsum(slotted, 0) - slotted
    for split in range(0, tl.max(splits, 0)):
        here = split < splits
        begin = start + split * split_tokens
        tl.store(item, seq, mask=here)
        tl.store(item + 1, row, mask=here)
        tl.store(item + 2, rows, mask=here)
        tl.store(item + 3, stop, mask=here)
        tl.store(item + 4, begin, mask=here)
        tl.store(item + 5, tl.where(splits > 1, tl.minimum(begin + split_tokens, end), end), mask=here)
        tl.store(item + 6, slot, mask=here)
        tl.store(item + 7, splits, mask=here)
        tl.store(item + 8, tl.zeros_like(seq) + split, mask=here)
        item += 9
    return used + tl.sum(splits, 0), slots + tl.sum(slotted, 0)


@triton.jit
def clear_items(items, used, max_items, BLOCK: tl.constexpr):
    """Mark the items after the first `used` ones as surplus."""
    for first in range(used, max_items, BLOCK):
        item = first + tl.arange(0, BLOCK)
        tl.store(items + 9 * item, -1, mask=item < max_items)


@triton.jit
def add_keys(
    acc, total, top, q, keys, values, table, first, end, length, row_end, scale, cap, block_stride,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Do one step of the running softmax, over keys [first, first + BLOCK_N) below `end`. Row i is at position
    length[i] - 1 and sees the keys below row_end[i].

    acc [rows, head_dim], total and top [rows] float32: weighted values, sum of weights and largest score (base 2).
    """
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, HEAD_PAD)
    inside = d[None, :] < HEAD_DIM
    if MASKED:  # values past the end may be anything, NaN included
        here = n < end
        block = tl.load(table + n // PAGE, mask=here, other=0)
        inside = inside & here[:, None]
    else:
        block = tl.load(table + n // PAGE)
    offset = block.to(tl.int64) * block_stride + n % PAGE * HEAD_DIM
    k = tl.load(keys + offset[:, None] + d[None, :], mask=inside, other=0.0).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if CAPPED:
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))  # cap * tanh
    if MASKED:
        visible = n[None, :] < row_end[:, None]
        if WINDOW:
            visible = visible & (n[None, :] >= length[:, None] - WINDOW)
        if CHUNK:
            visible = visible & (n[None, :] >= (length[:, None] - 1) // CHUNK * CHUNK)
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)  # a row that sees no key yet
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    v = tl.load(values + offset[:, None] + d[None, :], mask=inside, other=0.0).to(q.dtype)
    acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, highest


@triton.jit(do_not_specialize=["table_stride"])
def attend_kernel(
    q, cache, out, partial, partial_top, arrived, kv_scales, sinks, items, block_table, span_ends,
    scale, cap, q_stride, out_stride, block_stride, table_stride,
    GROUP: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    IMAGES: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, QUANTIZED: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_PAD: tl.constexpr, PRECISION: tl.constexpr,
    SLOT_ROWS: tl.constexpr, COMBINED: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Attend from the tile of each item of `plan_kernel`. Grid (items, kv_heads). SPLIT: tiles may have several items.

    Each item of a split tile leaves its result in `partial` [slots, kv_heads, SLOT_ROWS, HEAD_DIM], and the logarithm
    (base 2) of the sum of its weights in `partial_top` [slots, kv_heads, SLOT_ROWS]. They are counted in `arrived`
    [slots, kv_heads]; the last one combines all in the order of keys, COMBINED at a time, and resets the count.
    """
    dependent_launch.begin(DEPENDENT)
    items += 9 * tl.program_id(0)
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    seq = tl.load(items)
    if seq < 0:
        return
    row, rows, stop = tl.load(items + 1), tl.load(items + 2), tl.load(items + 3)
    begin, end, split = tl.load(items + 4), tl.load(items + 5), tl.load(items + 8)
    all_see = stop - rows + 1  # keys that every row sees; `stop` is what the last one sees without images

    m = tl.arange(0, BLOCK_M)  # rows outside, heads inside
    d = tl.arange(0, HEAD_PAD)
    inside = (m < rows * GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    head = kv_head * GROUP + m % GROUP
    q += tl.cast(row, tl.int64) * q_stride
    query = tl.load(q + (m // GROUP * q_stride + head * HEAD_DIM)[:, None] + d[None, :], mask=inside, other=0.0)
    length = all_see + m // GROUP
    row_end = length
    if IMAGES:
        row_end = tl.load(span_ends + row + m // GROUP, mask=m < rows * GROUP, other=0)
    page_size: tl.constexpr = PAGE * HEAD_DIM
    keys = cache + kv_head * page_size
    values = keys + kv_heads * page_size
    table = block_table + tl.cast(seq, tl.int64) * table_stride
    if QUANTIZED:
        scale *= tl.load(kv_scales)

    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634  # log2(e)
        top = tl.where(split == 0, sink, top)
        total = tl.where(split == 0, 1.0, total)
    masked_from = begin
    if not WINDOW and not CHUNK:
        masked_from += tl.maximum(tl.minimum(all_see, end) - begin, 0) // BLOCK_N * BLOCK_N
        for first in range(begin, masked_from, BLOCK_N):
            acc, total, top = add_keys(
                acc, total, top, query, keys, values, table, first, end, length, row_end, scale, cap,
                block_stride, PAGE, HEAD_DIM, WINDOW, CHUNK, CAPPED, False, BLOCK_N, HEAD_PAD, PRECISION,
            )  # fmt: skip
    for first in range(masked_from, end, BLOCK_N):
        acc, total, top = add_keys(
            acc, total, top, query, keys, values, table, first, end, length, row_end, scale, cap, block_stride,
            PAGE, HEAD_DIM, WINDOW, CHUNK, CAPPED, True, BLOCK_N, HEAD_PAD, PRECISION,
        )  # fmt: skip

    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    if QUANTIZED:
        acc *= tl.load(kv_scales + 1)
    out += tl.cast(row, tl.int64) * out_stride
    if SPLIT:
        slot, splits = tl.load(items + 6), tl.load(items + 7)
        if splits > 1:
            keep_split(
                acc, total, top, m, d, inside, partial, partial_top, arrived, out, slot, split, splits, kv_heads, rows,
                kv_head, out_stride, GROUP, HEAD_DIM, HEAD_PAD, SLOT_ROWS, COMBINED,
            )  # fmt: skip
            return
    target = out + (m // GROUP * out_stride + head * HEAD_DIM)[:, None] + d[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def keep_split(
    acc, total, top, m, d, inside, partial, partial_top, arrived, out, slot, split, splits, kv_heads, rows, kv_head,
    out_stride, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, SLOT_ROWS: tl.constexpr,
    COMBINED: tl.constexpr,
):  # fmt: skip
    """Store the results of one split of a tile: acc [m, d], and the sum and the largest exponent of its weights, [m]
    each. The last split to arrive combines the results of all. inside: [m, d], whether `out` has such an element."""
    place = ((slot + split) * kv_heads + kv_head) * SLOT_ROWS + m
    tl.store(partial + place[:, None] * HEAD_DIM + d[None, :], acc, mask=inside & (total > 0.0)[:, None])
    tl.store(partial_top + place, top + tl.log2(total), mask=m < rows * GROUP)  # -inf without keys
    tl.debug_barrier()  # all threads have stored before the arrival is counted
    counter = arrived + slot * kv_heads + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
        tl.store(counter, 0)
        combine(
            partial, partial_top, out, slot * kv_heads + kv_head, kv_heads, splits, rows, kv_head, out_stride,
            GROUP, HEAD_DIM, HEAD_PAD, SLOT_ROWS, COMBINED,
        )  # fmt: skip


@triton.jit
def combine(
    partial, partial_top, out, first, kv_heads, splits, rows, kv_head, out_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, SLOT_ROWS: tl.constexpr,
    COMBINED: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a tile's splits, weighted by the sums of their weights. Loads with .cg, which bypasses the
    L1 cache, since other programs wrote the splits."""
    m, d = tl.arange(0, SLOT_ROWS), tl.arange(0, HEAD_PAD)
    inside = (m < rows * GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    acc = tl.zeros([SLOT_ROWS, HEAD_PAD], tl.float32)
    total = tl.zeros([SLOT_ROWS], tl.float32)
    top = tl.full([SLOT_ROWS], float("-inf"), tl.float32)
    for split in range(0, splits, COMBINED):
        s = split + tl.arange(0, COMBINED)
        place = (first + s * kv_heads)[:, None] * SLOT_ROWS + m[None, :]
        here = (s < splits)[:, None] & (m < rows * GROUP)[None, :]
        tops = tl.load(partial_top + place, mask=here, other=float("-inf"), cache_modifier=".cg")
        here = (tops > float("-inf"))[:, :, None] & inside[None, :, :]
        outputs = tl.load(
            partial + place[:, :, None] * HEAD_DIM + d[None, None, :], mask=here, other=0.0, cache_modifier=".cg"
        )  # fmt: skip
        highest = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights, shrink = tl.exp2(tops - base[None, :]), tl.exp2(top - base)
        acc = acc * shrink[:, None] + tl.sum(outputs * weights[:, :, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = highest
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + (m // GROUP * out_stride + (kv_head * GROUP + m % GROUP) * HEAD_DIM)[:, None] + d[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside)


def paged_attention(
    q: Tensor, batch: Batch, layer: int, scale: float, window: int | None = None,
    *, softcap: float | None = None, sinks: Tensor | None = None, chunk: int | None = None,
) -> Tensor:  # fmt: skip
    """Attend: q [tokens, heads, head_dim] -> the same shape and dtype, contiguous. sinks: [heads] of q's dtype."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = q.shape[1] // batch.kv_cache.shape[3]
    if len(batch.single):
        block_m = max(DECODE_ROWS, triton.next_power_of_2(group))
        launch(q, out, batch, layer, scale, window, softcap, sinks, chunk, batch.single, block_m, decode=True)
    if batch.chunks:
        block_m = chunk_rows(max(c.count for c in batch.chunks), group, q.shape[2], q.dtype, q.device)
        tiles = chunk_tiles(batch, block_m // group)
        launch(q, out, batch, layer, scale, window, softcap, sinks, chunk, tiles, block_m, decode=False)
    return out


def chunk_tiles(batch: Batch, rows: int) -> Tensor:
    """Return the tiles of the chunks. In a graph they are an input; otherwise they are made once for all layers with
    the same `rows`."""
    if batch.tiles is not None:
        return batch.tiles
    key = "tiles", rows
    if key not in batch.plans:
        chunk_fields = [(chunk.seq, chunk.first_row, chunk.count, chunk.kv_len) for chunk in batch.chunks]
        batch.plans[key] = copy_to(row_tiles(chunk_fields, rows), batch.kv_len.device)
    return batch.plans[key]


def launch(
    q: Tensor, out: Tensor, batch: Batch, layer: int, scale: float, window: int | None,
    softcap: float | None, sinks: Tensor | None, chunk: int | None, tiles: Tensor, block_m: int, *, decode: bool,
) -> None:  # fmt: skip
    """Attend from the decoding rows, or from all chunks, and write their rows of `out`.

    q, out: [tokens, heads, head_dim]. tiles: `Batch.single` to decode, or from `row_tiles`. block_m: rows of a tile
    times heads per KV head. If keys are split, partial results are float32 [slots, kv_heads, slot_rows, head_dim].
    """
    kv_cache = batch.kv_cache
    _, _, _, kv_heads, page, head_dim = kv_cache.shape
    group, head_pad = q.shape[1] // kv_heads, max(16, triton.next_power_of_2(head_dim))
    wide = q.dtype == torch.float32
    small = not (decode or hopper(q.device))  # other GPUs have fewer registers for a tile, and less shared memory
    block_n = min(64 if small else 128, max(16, KEY_TILE_BYTES // (head_pad * q.element_size())))
    slot_rows = triton.next_power_of_2(group) if decode else block_m
    slot_bytes = kv_heads * slot_rows * head_dim * 4
    programs = (DECODE_PROGRAMS if decode else PROGRAMS_PER_PROCESSOR) * processors(q.device)
    wanted = max(1, min(programs // kv_heads, PARTIAL_BYTES // slot_bytes // 2))
    longest = batch.block_table.shape[1] * page
    span_ends, seen = batch.span_ends, [longest]
    if span_ends is None:
        seen += [mask + block_m for mask in (window, chunk) if mask]
    split = min(seen) > MIN_SPLIT_TOKENS
    items = plan(batch, tiles, wanted, window or 0, chunk or 0, block_n, decode=decode)
    partial = partial_top = arrived = out  # not used
    if split:  # rounding up at most doubles a tile's share of the splits, so there are at most 2 * wanted
        partial = torch.empty((2 * wanted, kv_heads, slot_rows, head_dim), dtype=torch.float32, device=q.device)
        partial_top = torch.empty((2 * wanted, kv_heads, slot_rows), dtype=torch.float32, device=q.device)
        arrived = counters(q.device)
    steepness = 1.0 if softcap is None else 2 / softcap  # the kernel's tanh(x) takes e ** 2x
    kv_scales = kv_cache if batch.kv_scales is None else batch.kv_scales[layer]
    attend_kernel[len(items), kv_heads](
        q, kv_cache[0, layer], out, partial, partial_top, arrived, kv_scales, q if sinks is None else sinks,
        items, batch.block_table, q if span_ends is None else span_ends,
        scale * steepness * LOG2_E, (softcap or 0.0) * LOG2_E,
        q.stride(0), out.stride(0), kv_cache.stride(0), batch.block_table.stride(0),
        GROUP=group, PAGE=page, HEAD_DIM=head_dim, WINDOW=window or 0, CHUNK=chunk or 0,
        IMAGES=span_ends is not None, CAPPED=softcap is not None, SINKS=sinks is not None,
        QUANTIZED=batch.kv_scales is not None, SPLIT=split,
        BLOCK_M=block_m, BLOCK_N=block_n, HEAD_PAD=head_pad, PRECISION="ieee" if wide else "tf32",
        SLOT_ROWS=slot_rows, COMBINED=max(1, COMBINED_VALUES // (slot_rows * head_pad)),
        num_warps=8 if block_m * max(head_pad, block_n) >= CHUNK_ROWS * SMALL_HEAD_DIM else 4,  # for their registers
        num_stages=NUM_STAGES - 1 if small and head_dim > SMALL_HEAD_DIM else NUM_STAGES,
        **dependent_launch.options(q.device),
    )  # fmt: skip


def plan(batch: Batch, tiles: Tensor, wanted: int, window: int, chunk: int, block_n: int, *, decode: bool) -> Tensor:
    """Return how keys are divided over programs, [tiles + wanted, 9] int32: see `plan_kernel`. The first layer with
    this window computes it for all such layers."""
    key, span_ends = (decode, window, chunk), batch.span_ends
    items = batch.plans.get(key)
    if items is None:
        items = batch.plans[key] = torch.empty((len(tiles) + wanted, 9), dtype=torch.int32, device=tiles.device)
        plan_kernel[1,](
            items, tiles, batch.single, batch.query_start, batch.kv_len,
            batch.kv_len if span_ends is None else span_ends, len(tiles), wanted, len(items), DECODE=decode,
            WINDOW=window, CHUNK=chunk, IMAGES=span_ends is not None, BLOCK_N=block_n,
            MIN_TOKENS=MIN_SPLIT_TOKENS, BLOCK=PLAN_BLOCK,
        )  # fmt: skip
    return items


@cache
def counters(device: torch.device) -> Tensor:
    """Return counters for `arrived`. Every kernel leaves zeros, and steps do not overlap, so one tensor serves all."""
    return torch.zeros(2 * DECODE_PROGRAMS * processors(device), dtype=torch.int32, device=device)


def tile_rows(longest: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the number of rows of a tile, for a batch whose longest chunk has `longest` rows."""
    group = heads // kv_heads
    return chunk_rows(longest, group, head_dim, dtype, device) // group


def chunk_rows(longest: int, group: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the number of rows of a tile times the number of heads that share a KV head, a power of two."""
    small = max(SMALL_CHUNK_ROWS, triton.next_power_of_2(group))
    if longest * group <= small or dtype == torch.float32:  # 128 rows of float32 do not fit into the registers
        return small
    large = CHUNK_ROWS if head_dim <= SMALL_HEAD_DIM or hopper(device) else CHUNK_ROWS // 2
    return max(large, small)


@cache
def hopper(device: torch.device) -> bool:
    """Return whether this is Hopper, or a newer GPU for data centres with as much shared memory."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) in ((9, 0), (10, 0), (10, 3))


@cache
def processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors; a small number for the serial interpreter."""
    if device.type == "cpu":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
