"""Low-rank products on a GPU, in Triton, grouped by adapter: Punica's SGMV, arXiv:2310.18547, section 4.

Both kernels find the rows of each adapter in memory, so that a CUDA graph serves any mixture of adapters. The number
of tiles depends on the mixture. A graph has programs for the largest possible number, and programs without a tile end
at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.low_rank import BLOCK, LANES, TILE_ROWS, AdapterRows, LowRankWeights

ROWS = TILE_ROWS["cuda"]
INPUTS = 64  # that are multiplied at a time


@triton.jit
def tile_of(table, ranks, tile, ROWS: tl.constexpr):
    """Return the slot of a tile, its adapter's rank in this layer, its rows, and a mask of the rows that exist."""
    tiles = tl.load(table)
    slot, first, count = tl.load(table + 1 + 3 * tile), tl.load(table + 2 + 3 * tile), tl.load(table + 3 + 3 * tile)
    i = tl.arange(0, ROWS)
    rows = tl.load(table + 1 + 3 * tiles + first + i, mask=i < count, other=0).to(tl.int64)
    return slot.to(tl.int64), tl.load(ranks + slot), rows, i < count


@triton.jit(do_not_specialize=["stride"])
def shrink_kernel(
    x, shrunk, a, ranks, table, stride,
    SIZE: tl.constexpr, PARTS: tl.constexpr, SLICES: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Compute shrunk[row, part, slice] = A x, over SIZE inputs. Grid (tiles, parts, slices)."""
    tile, part, slice_ = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tile < tl.load(table):
        slot, rank, rows, there = tile_of(table, ranks, tile, ROWS)
        if rank > 0:
            c = tl.arange(0, RANK_PAD)
            inputs = x + rows[:, None] * stride + part * SIZE
            factor = a + (slot * SLICES + slice_) * RANK * PARTS * SIZE + part * SIZE * LANES
            columns = factor + (c // LANES * LANES * PARTS * SIZE + c % LANES)[None, :]
            total = tl.zeros((ROWS, RANK_PAD), dtype=tl.float32)
            for start in range(0, SIZE, INPUTS):
                i = start + tl.arange(0, INPUTS)
                inside = i < SIZE
                left = tl.load(inputs + i[None, :], mask=there[:, None] & inside[None, :], other=0.0)
                used = inside[:, None] & (c < rank)[None, :]
                right = tl.load(columns + i[:, None] * LANES, mask=used, other=0.0)
                total = tl.dot(left, right, total, input_precision="ieee")
            target = ((rows * PARTS + part) * SLICES + slice_) * RANK
            tl.store(shrunk + target[:, None] + c[None, :], total, mask=there[:, None] & (c < rank)[None, :])


@triton.jit(do_not_specialize=["stride"])
def expand_kernel(
    out, shrunk, b, ranks, table, blocks, stride,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Add B shrunk[row] to out[row], for the outputs of a block. Grid (tiles, blocks)."""
    tile = tl.program_id(0)
    if tile < tl.load(table):
        slot, rank, rows, there = tile_of(table, ranks, tile, ROWS)
        if rank > 0:
            block = blocks + 4 * tl.program_id(1)
            start, size = tl.load(block), tl.load(block + 1)
            slice_, column = tl.load(block + 2), tl.load(block + 3)
            c, o = tl.arange(0, RANK_PAD), tl.arange(0, BLOCK)
            factor = b + (slot * OUTPUTS + column) * RANK + (o // LANES * LANES * RANK + o % LANES)[None, :]
            left = tl.load(
                shrunk + rows[:, None] * WIDTH + slice_ * RANK + c[None, :],
                mask=there[:, None] & (c < rank)[None, :], other=0.0,
            )  # fmt: skip
            right = tl.load(
                factor + c[:, None] * LANES, mask=(c < rank)[:, None] & (o < size)[None, :], other=0.0
            )  # fmt: skip
            inside = there[:, None] & (o < size)[None, :]
            target = out + rows[:, None] * stride + start + o[None, :]
            total = tl.load(target, mask=inside, other=0.0).to(tl.float32)
            total += tl.dot(left.to(right.dtype), right, input_precision="ieee")
            tl.store(target, total.to(out.dtype.element_ty), mask=inside)


def add(outs: Sequence[Tensor], x: Tensor, weights: LowRankWeights, rows: AdapterRows) -> None:
    """Add the adapters. x: each token's values contiguous, as in `outs`. The launches do not depend on which rows have
    an adapter."""
    parts, (slots, columns, rank, _), slices = len(outs), weights.b.shape, weights.slices
    size, width = weights.a.shape[2] // parts, parts * slices * rank
    shrunk = torch.empty(len(x), width, dtype=torch.float32, device=x.device)
    tiles, rank_pad = min(len(x), len(x) // ROWS + slots), triton.next_power_of_2(rank)
    shrink_kernel[tiles, parts, slices](
        x, shrunk, weights.a, weights.ranks, rows.table, x.stride(0),
        SIZE=size, PARTS=parts, SLICES=slices, RANK=rank, RANK_PAD=rank_pad, ROWS=ROWS, INPUTS=INPUTS,
        LANES=LANES,
    )  # fmt: skip
    for part, out in enumerate(outs):
        expand_kernel[tiles, len(weights.blocks)](
            out, shrunk[:, part * slices * rank :], weights.b, weights.ranks, rows.table, weights.blocks,
            out.stride(0), OUTPUTS=columns * LANES, WIDTH=width, RANK=rank, RANK_PAD=rank_pad, ROWS=ROWS, BLOCK=BLOCK,
            LANES=LANES,
        )  # fmt: skip
