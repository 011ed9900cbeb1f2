"""The experts of a layer, in Triton: two launches for all experts, however many tokens each of them gets.

As in vLLM's fused_moe, pairs of a token and one of its experts are sorted by expert and divided into tiles of one
expert's pairs each. Only the device knows the number of tiles; the grid is for as many as there can be, and programs
without a tile end at once. So nothing here waits for the device, and a CUDA graph can hold it. Biases and weights in
MXFP4 have run under Triton's interpreter only, not on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from engine.model.ops.gpu.mxfp4 import load_tile
from engine.model.quantization.mxfp4 import PackedExperts

FEW, MANY = 16, 64  # rows of a tile
BLOCK_K_BYTES = 128


@triton.jit(do_not_specialize=["num_tiles", "pairs_per_row"])  # both follow the number of tokens
def grouped_kernel(
    x, weight, scales, bias, out, order, tiles, num_tiles, size_n, size_k, stride_x, pairs_per_row,
    MXFP4: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, size_n / BLOCK_N): for the pairs of a tile, out[pair] =
    x[pair // pairs_per_row] @ weight[expert].T + bias

    scales: of a weight in MXFP4, which `weight` then holds in blocks.
    Tiles of one expert are neighbours, so that what they read of its weight is read from memory once.
    """
    tile = tl.program_id(0)
    expert = tl.load(tiles + tile)
    first, end = tl.load(tiles + num_tiles + tile), tl.load(tiles + 2 * num_tiles + tile)
    if first >= end:
        return
    m = first + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.load(order + m, mask=m < end, other=0)
    rows = x + (pair // pairs_per_row)[:, None] * stride_x
    columns = weight + expert * size_n * size_k + n[None, :] * size_k
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, size_k, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(rows + k[None, :], mask=(m < end)[:, None] & (k < size_k)[None, :], other=0.0)
        if MXFP4:
            b = load_tile(weight, scales, expert, n, start, size_n, size_k, BLOCK_N, BLOCK_K, a.dtype).trans()
        else:
            b = tl.load(columns + k[:, None], mask=(n < size_n)[None, :] & (k < size_k)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if BIASED:
        acc += tl.load(bias + expert * size_n + n, mask=n < size_n, other=0.0).to(tl.float32)[None, :]
    there = out + pair[:, None] * size_n + n[None, :]
    tl.store(there, acc.to(out.dtype.element_ty), mask=(m < end)[:, None] & (n < size_n)[None, :])


def grouped_linear(
    x: Tensor, weight: Tensor | PackedExperts, bias: Tensor | None, order: Tensor, tiles: Tensor, tile_rows: int
) -> Tensor:
    """[pairs, outputs], each pair's row of `x` times its expert's weight.

    x: [rows, inputs], with contiguous columns; with fewer rows than pairs, neighbouring pairs share one
    weight: [experts, outputs, inputs], packed or not; bias: [experts, outputs] or None; order, tiles: see `tile_pairs`
    """
    pairs, (_, size_n, size_k) = len(order), weight.shape
    values, scales = (weight.blocks, weight.scales) if isinstance(weight, PackedExperts) else (weight, weight)
    out = torch.empty(pairs, size_n, dtype=x.dtype, device=x.device)
    wide = x.dtype == torch.float32
    packed = isinstance(weight, PackedExperts)
    block_n = 128 if tile_rows == MANY and not wide else 64
    num_warps = 8 if tile_rows == MANY and packed else 4  # unpacking takes registers
    grouped_kernel[tiles.shape[1], triton.cdiv(size_n, block_n)](
        x, values, scales, values if bias is None else bias, out, order, tiles, tiles.shape[1], size_n, size_k,
        x.stride(0), pairs // len(x), MXFP4=packed, BIASED=bias is not None,
        BLOCK_M=tile_rows, BLOCK_N=block_n, BLOCK_K=BLOCK_K_BYTES // x.element_size(),
        PRECISION="ieee" if wide else "tf32", num_warps=num_warps, num_stages=3,
    )  # fmt: skip
    return out


def tile_pairs(experts: Tensor, num_experts: int, tile_rows: int) -> tuple[Tensor, Tensor]:
    """Divide the pairs into tiles of one expert each.

    Returns order [pairs] int64, the entries of `experts` sorted by expert, and tiles [3, max_tiles] int64: the expert,
    and where its rows in `order` begin and end. Surplus tiles begin after their end.
    """
    chosen, order = experts.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(num_experts, device=experts.device), right=True)
    begins = F.pad(ends[:-1], (1, 0))
    counts = (ends - begins + tile_rows - 1) // tile_rows  # tiles of each expert
    last = counts.cumsum(0)
    pairs = len(order)
    # each expert with a pair may need one tile that is not full
    max_tiles = (pairs + min(pairs, num_experts) * (tile_rows - 1)) // tile_rows
    tile = torch.arange(max_tiles, device=experts.device)
    expert = torch.searchsorted(last, tile, right=True).clamp(max=num_experts - 1)
    first = begins[expert] + (tile - (last - counts)[expert]) * tile_rows
    return order, torch.stack([expert, first, torch.minimum(first + tile_rows, ends[expert])])


def mix_experts(
    x: Tensor,
    gate_up: Tensor | PackedExperts,
    down: Tensor | PackedExperts,
    activation: Callable[[Tensor], Tensor],
    experts: Tensor,
    weights: Tensor,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Sum a token's experts in the order of `experts`, whatever else is in the batch."""
    tile_rows = FEW if experts.numel() <= FEW * gate_up.shape[0] else MANY
    order, tiles = tile_pairs(experts, gate_up.shape[0], tile_rows)
    first, second = biases or (None, None)
    hidden = activation(grouped_linear(x, gate_up, first, order, tiles, tile_rows))
    mixed = grouped_linear(hidden, down, second, order, tiles, tile_rows).view(*experts.shape, -1)
    return (mixed * weights.unsqueeze(2)).sum(1)
