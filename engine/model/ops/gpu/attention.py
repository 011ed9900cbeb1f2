"""Paged attention in Triton: one kernel for rows that decode and for chunks of prompts. See ops/attention.py;
`rotate_and_write` is in rope.py.

A program owns a tile of rows of one sequence, with all query heads that share one KV head, so that K and V are read
once for all of them. It walks over the keys with a running softmax (FlashAttention-2, arXiv:2307.08691). Rows that
decode are few and their sequences long, so the keys are also split over programs and the results combined by a second
kernel (Flash-Decoding, https://pytorch.org/blog/flash-decoding, 2023).

CUDA graphs can hold it: for sequences that decode, the grid and every argument follow from shapes alone, and lengths
are read on the device. A sequence with kv_len 0 pads such a batch; its output is 0. Results depend on the number of
programs that the keys are split over and so, in the last bits, on the size of the batch. Tile sizes are estimates.
Capped scores, sinks and chunks have run under Triton's interpreter only, not on a GPU yet.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.batch import Batch

LOG2_E = math.log2(math.e)
CHUNK_ROWS, SMALL_CHUNK_ROWS, DECODE_ROWS = 128, 32, 16  # rows x heads of a tile; tl.dot wants 16 at least
KEY_TILE_BYTES = 16 * 1024  # K, and as much V, in each stage of a pipeline in shared memory
NUM_STAGES = 5  # a block's id is loaded before its K and V, so that this keeps three tiles on their way, not five
PROGRAMS_PER_PROCESSOR = 4  # enough to keep the memory busy
MIN_SPLIT_TOKENS = 256  # keys that are worth a program
SPLIT_COUNTS = (1, 4, 16, 64)  # few values, since each is a kernel of its own
INTERPRETED_PROCESSORS = 8


@triton.jit
def add_keys(
    acc, total, top, q, keys, values, table, first, end, length, scale, cap, block_stride,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the running softmax, over keys [first, first + BLOCK_N) below `end`; row i sees the first length[i].

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
        visible = n[None, :] < length[:, None]
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
    q, cache, out, partial, partial_top, kv_scales, sinks, tiles, single, query_start, kv_len, block_table,
    scale, cap, q_stride, out_stride, block_stride, table_stride,
    GROUP: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, DECODE: tl.constexpr,
    NUM_SPLITS: tl.constexpr, SLOTS: tl.constexpr, QUANTIZED: tl.constexpr, MIN_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv_heads, NUM_SPLITS). A tile is (sequence, first row, rows, rows of the sequence after these).

    WINDOW 0 and CHUNK 0 mean none. With NUM_SPLITS > 1 each program leaves its result in `partial` [tiles, kv_heads,
    NUM_SPLITS, SLOTS, HEAD_DIM] and the logarithm (base 2) of its weights' sum in `partial_top`, without HEAD_DIM.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if DECODE:
        seq = tl.load(single + tile)
        row = tl.load(query_start + seq)
        rows = 1
        stop = tl.load(kv_len + seq)
    else:
        seq = tl.load(tiles + 4 * tile)
        row = tl.load(tiles + 4 * tile + 1)
        rows = tl.load(tiles + 4 * tile + 2)
        stop = tl.load(kv_len + seq) - tl.load(tiles + 4 * tile + 3)
    all_see = stop - rows + 1  # keys that every row sees; `stop` is what the last one sees
    start = 0
    if WINDOW:
        start = tl.maximum(all_see - WINDOW, 0)
    if CHUNK:
        start = tl.maximum(tl.maximum(all_see - 1, 0) // CHUNK * CHUNK, start)
    split_tokens = tl.cdiv(tl.maximum(tl.cdiv(stop - start, NUM_SPLITS), MIN_TOKENS), BLOCK_N) * BLOCK_N
    begin = start + split * split_tokens
    end = tl.minimum(begin + split_tokens, stop)

    m = tl.arange(0, BLOCK_M)  # rows outside, heads inside
    d = tl.arange(0, HEAD_PAD)
    inside = (m < rows * GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    head = kv_head * GROUP + m % GROUP
    q += tl.cast(row, tl.int64) * q_stride
    query = tl.load(q + (m // GROUP * q_stride + head * HEAD_DIM)[:, None] + d[None, :], mask=inside, other=0.0)
    length = all_see + m // GROUP
    page_size: tl.constexpr = PAGE * HEAD_DIM
    keys = cache + kv_head * page_size
    values = keys + tl.num_programs(1) * page_size
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
                acc, total, top, query, keys, values, table, first, end, length, scale, cap, block_stride,
                PAGE, HEAD_DIM, WINDOW, CHUNK, CAPPED, False, BLOCK_N, HEAD_PAD, PRECISION,
            )  # fmt: skip
    for first in range(masked_from, end, BLOCK_N):
        acc, total, top = add_keys(
            acc, total, top, query, keys, values, table, first, end, length, scale, cap, block_stride,
            PAGE, HEAD_DIM, WINDOW, CHUNK, CAPPED, True, BLOCK_N, HEAD_PAD, PRECISION,
        )  # fmt: skip

    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    if QUANTIZED:
        acc *= tl.load(kv_scales + 1)
    if NUM_SPLITS == 1:
        out += tl.cast(row, tl.int64) * out_stride
        target = out + (m // GROUP * out_stride + head * HEAD_DIM)[:, None] + d[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside)
    else:
        slot = ((tl.cast(tile, tl.int64) * tl.num_programs(1) + kv_head) * NUM_SPLITS + split) * SLOTS + m
        tl.store(partial + slot[:, None] * HEAD_DIM + d[None, :], acc, mask=inside & (total > 0.0)[:, None])
        tl.store(partial_top + slot, top + tl.log2(total), mask=m < rows * GROUP)  # -inf for a split without keys


@triton.jit
def combine_kernel(
    partial, partial_top, out, tiles, single, query_start, out_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DECODE: tl.constexpr,
    NUM_SPLITS: tl.constexpr, SLOTS: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv_heads, SLOTS): the splits' outputs, weighted by their weights' sums."""
    tile, kv_head, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if DECODE:
        row = tl.load(query_start + tl.load(single + tile))
        rows = 1
    else:
        row = tl.load(tiles + 4 * tile + 1)
        rows = tl.load(tiles + 4 * tile + 2)
    if m >= rows * GROUP:
        return
    d = tl.arange(0, HEAD_PAD)
    slot = (tl.cast(tile, tl.int64) * tl.num_programs(1) + kv_head) * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    slot = slot * SLOTS + m
    tops = tl.load(partial_top + slot)
    used = tops > float("-inf")
    highest = tl.max(tops, 0)
    weights = tl.where(used, tl.exp2(tops - tl.where(highest == float("-inf"), 0.0, highest)), 0.0)
    inside = used[:, None] & (d < HEAD_DIM)[None, :]
    outputs = tl.load(partial + slot[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(outputs * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    target = out + tl.cast(row + m // GROUP, tl.int64) * out_stride + (kv_head * GROUP + m % GROUP) * HEAD_DIM + d
    tl.store(target, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)


def paged_attention(
    q: Tensor, batch: Batch, layer: int, scale: float, window: int | None = None,
    *, softcap: float | None = None, sinks: Tensor | None = None, chunk: int | None = None,
) -> Tensor:  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = q.shape[1] // batch.kv_cache.shape[3]
    if len(batch.single):
        longest = batch.block_table.shape[1] * batch.kv_cache.shape[4]
        block_m = max(DECODE_ROWS, triton.next_power_of_2(group))
        launch(
            q, out, batch, layer, scale, window, softcap, sinks, chunk, len(batch.single), longest, block_m, decode=True
        )
    if batch.chunks:
        block_m = chunk_rows(max(c.count for c in batch.chunks), group, q.dtype)
        if batch.tiles is None:
            batch.tiles = row_tiles(batch, block_m // group)
        longest = max(c.kv_len for c in batch.chunks)
        launch(
            q, out, batch, layer, scale, window, softcap, sinks, chunk, len(batch.tiles), longest, block_m, decode=False
        )
    return out


def launch(
    q: Tensor, out: Tensor, batch: Batch, layer: int, scale: float, window: int | None,
    softcap: float | None, sinks: Tensor | None, chunk: int | None,
    tiles: int, longest: int, block_m: int, *, decode: bool,
) -> None:  # fmt: skip
    """Attend from the rows that decode, or from all chunks, to at most `longest` keys."""
    kv_cache = batch.kv_cache
    _, _, _, kv_heads, page, head_dim = kv_cache.shape
    group, head_pad = q.shape[1] // kv_heads, max(16, triton.next_power_of_2(head_dim))
    wide = q.dtype == torch.float32
    block_n = min(128, max(16, KEY_TILE_BYTES // (head_pad * q.element_size())))
    keys = min(longest, (window or longest) + block_m, (chunk or longest) + block_m)
    splits = num_splits(tiles * kv_heads, keys, processors(q.device), decode=decode)
    slots = group if decode else block_m // group * group  # rows x heads of a full tile
    partial = partial_top = out  # not used
    if splits > 1:
        partial = torch.empty((tiles, kv_heads, splits, slots, head_dim), dtype=torch.float32, device=q.device)
        partial_top = torch.empty((tiles, kv_heads, splits, slots), dtype=torch.float32, device=q.device)
    steepness = 1.0 if softcap is None else 2 / softcap  # the kernel's tanh(x) takes e ** 2x
    row_tiles = batch.single if decode else batch.tiles
    kv_scales = kv_cache if batch.kv_scales is None else batch.kv_scales[layer]
    attend_kernel[tiles, kv_heads, splits](
        q, kv_cache[0, layer], out, partial, partial_top, kv_scales, q if sinks is None else sinks,
        row_tiles, batch.single, batch.query_start, batch.kv_len, batch.block_table,
        scale * steepness * LOG2_E, (softcap or 0.0) * LOG2_E,
        q.stride(0), out.stride(0), kv_cache.stride(0), batch.block_table.stride(0),
        GROUP=group, PAGE=page, HEAD_DIM=head_dim, WINDOW=window or 0, CHUNK=chunk or 0,
        CAPPED=softcap is not None, SINKS=sinks is not None, DECODE=decode,
        NUM_SPLITS=splits, SLOTS=slots, QUANTIZED=batch.kv_scales is not None, MIN_TOKENS=MIN_SPLIT_TOKENS,
        BLOCK_M=block_m, BLOCK_N=block_n, HEAD_PAD=head_pad, PRECISION="ieee" if wide else "tf32",
        num_warps=8 if block_m >= CHUNK_ROWS else 4, num_stages=NUM_STAGES,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[tiles, kv_heads, slots](
            partial, partial_top, out, row_tiles, batch.single, batch.query_start, out.stride(0),
            GROUP=group, HEAD_DIM=head_dim, DECODE=decode, NUM_SPLITS=splits, SLOTS=slots, HEAD_PAD=head_pad,
        )  # fmt: skip


def chunk_rows(longest: int, group: int, dtype: torch.dtype) -> int:
    """Rows x heads of a tile, a power of two, for the longest chunk of a batch."""
    small = max(SMALL_CHUNK_ROWS, triton.next_power_of_2(group))
    if longest * group <= small or dtype == torch.float32:  # 128 rows of float32 do not fit into the registers
        return small
    return max(CHUNK_ROWS, small)


def row_tiles(batch: Batch, rows: int) -> Tensor:
    """[tiles, 4] int32: sequence, first row, number of rows (at most `rows`), and rows of the sequence after these.

    The last rows of each chunk come first: they see the most keys, and the GPU starts tiles in order.
    """
    tiles = []
    for chunk in batch.chunks:
        for row in range((chunk.count - 1) // rows * rows, -1, -rows):
            count = min(rows, chunk.count - row)
            tiles.append((chunk.seq, chunk.first_row + row, count, chunk.count - row - count))
    device = batch.query_start.device
    pinned = device.type == "cuda"  # so that the copy waits for nothing
    return torch.tensor(tiles, dtype=torch.int32, device="cpu", pin_memory=pinned).to(device, non_blocking=True)


def num_splits(programs: int, longest: int, processors: int, *, decode: bool) -> int:
    """Number of programs that share the keys of one tile: enough for the whole GPU, but none for a few keys.

    For rows that decode there are at least 4 if sequences may be long: a batch that fills the GPU with short
    sequences and one long one would wait for the long one. Splits that a short sequence does not need end at once.
    """
    wanted = max(4 if decode else 1, PROGRAMS_PER_PROCESSOR * processors // programs)
    fitting = min(wanted, longest // MIN_SPLIT_TOKENS)
    return max([splits for splits in SPLIT_COUNTS if splits <= fitting], default=1)


@cache
def processors(device: torch.device) -> int:
    """Number of streaming multiprocessors; a small number for the interpreter, which runs programs one by one."""
    if device.type == "cpu":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
