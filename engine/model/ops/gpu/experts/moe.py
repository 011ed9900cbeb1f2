"""The experts of a layer, in Triton: two launches for all experts, however many tokens each of them gets.

As in vLLM's fused_moe, pairs of a token and one of its experts are sorted by expert and divided into tiles, each with
pairs of one expert (routing.py). Only the device knows the number of tiles. So the grid has the largest possible number
of programs, and programs without a tile end at once. Nothing waits for the device, so the kernels can be part of a CUDA
graph. Quantized weights are read as stored. If a checkpoint needs rows in float8 too, rows and weights are multiplied
in float8, on GPUs that can (from Ada on). Other weights are dequantized tile by tile (weights.py, mxfp4.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.ops.gpu import activation as activations
from engine.model.ops.gpu import dependent_launch, fused_quantize, quantize
from engine.model.ops.gpu.experts import mxfp4
from engine.model.ops.gpu.experts.routing import combine, sort_pairs
from engine.model.ops.gpu.experts.weights import load_tile
from engine.model.quantization.packed_experts import PackedExperts
from engine.model.quantization.rows import QuantizedRows, RowFormat
from engine.model.quantization.weight import FP8

FEW, MANY = 16, 64  # rows of a tile
BLOCK_K_BYTES = 128
MXFP4_BLOCK_K = 128
ROW_GROUPS = (64, 128, 256)  # columns of a row that may share a scale in products of float8
LEAST_FLOAT8 = (8, 9)  # compute capability from which tensor cores multiply float8
SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
WHOLE_ROW = 1 << 30  # group size if all inputs share one scale
LONGEST_GROUP = tl.constexpr(max(ROW_GROUPS))


@triton.jit(do_not_specialize=["num_tiles", "pairs_per_row", "row_stride", "group_stride"])
def grouped_kernel(
    x, row_scales, weight, scales, offsets, bias, out, order, tiles, num_tiles, size_n, size_k, groups, stride_x,
    pairs_per_row, row_stride, group_stride, FORMAT: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Compute out[pair] = x[pair // pairs_per_row] @ weight[expert].T + bias, for the pairs of a tile. Grid (tiles,
    size_n / BLOCK_N).

    scales, offsets, groups, FORMAT, GROUP: for quantized weights, see `load_tile`; FORMAT is `dense` for others, and
    `rounded` if rows and weights are float8. Then row_scales, row_stride and group_stride give the scale of each row,
    or of each GROUP of its columns, and `scales` the scales of the weights. Tiles of one expert are adjacent, so that
    its weight is read from memory once. Arguments that change with the number of tokens are not specialized.
    """
    dependent_launch.begin(DEPENDENT)
    tile = tl.program_id(0)
    expert = tl.load(tiles + tile)
    first, end = tl.load(tiles + num_tiles + tile), tl.load(tiles + 2 * num_tiles + tile)
    if first >= end:
        return
    m = first + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.load(order + m, mask=m < end, other=0)
    row = pair // pairs_per_row
    rows = x + row[:, None] * stride_x
    columns = weight + expert * size_n * size_k + n[None, :] * size_k
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, size_k, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(rows + k[None, :], mask=(m < end)[:, None] & (k < size_k)[None, :], other=0.0)
        if FORMAT == "mxfp4" and PRECISION != "ieee":
            acc = mxfp4.multiply(a, acc, weight, scales, expert, n, start, size_n, size_k, BLOCK_K, PRECISION)
        elif FORMAT == "dense" or FORMAT == "rounded":
            b = tl.load(columns + k[:, None], mask=(n < size_n)[None, :] & (k < size_k)[:, None], other=0.0)
            if FORMAT == "dense" or GROUP > LONGEST_GROUP:
                acc = tl.dot(a, b, acc, input_precision=PRECISION)
            else:
                group = start // GROUP
                scale = tl.load(row_scales + row * row_stride + group * group_stride, mask=m < end, other=0.0)
                factor = tl.load(scales + (expert * size_n + n) * groups + group, mask=n < size_n, other=0.0)
                acc += tl.dot(a, b) * scale[:, None] * factor[None, :]
        else:
            b = load_tile(
                weight, scales, offsets, expert, n, start, size_n, size_k, groups,
                FORMAT, GROUP, BLOCK_N, BLOCK_K, a.dtype,
            ).trans()  # fmt: skip
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if FORMAT == "rounded" and GROUP > LONGEST_GROUP:
        scale = tl.load(row_scales + row * row_stride, mask=m < end, other=0.0)
        factor = tl.load(scales + expert * size_n + n, mask=n < size_n, other=0.0)
        acc *= scale[:, None] * factor[None, :]
    if BIASED:
        acc += tl.load(bias + expert * size_n + n, mask=n < size_n, other=0.0).to(tl.float32)[None, :]
    there = out + pair[:, None] * size_n + n[None, :]
    tl.store(there, acc.to(out.dtype.element_ty), mask=(m < end)[:, None] & (n < size_n)[None, :])


def grouped_linear(
    x: Tensor | QuantizedRows, weight: Tensor | PackedExperts, bias: Tensor | None, order: Tensor, tiles: Tensor,
    tile_rows: int,
) -> Tensor:  # fmt: skip
    """Return the product of each pair's row of `x` with its expert's weight: [pairs, outputs].

    x: [rows, inputs], with contiguous columns, or quantized in the weight's `row_format`. If it has fewer rows than
    pairs, pairs / rows adjacent pairs share a row. weight: [experts, outputs, inputs], packed or not; bias: [experts,
    outputs] or None; order, tiles: see SortedPairs.
    """
    pairs, (_, size_n, size_k) = len(order), weight.shape
    rounded = isinstance(x, QuantizedRows)
    rows, row_scales, num_rows, dtype = x if isinstance(x, QuantizedRows) else QuantizedRows(x, x, len(x), x.dtype)
    out = torch.empty(pairs, size_n, dtype=dtype, device=rows.device)
    wide, many = dtype == torch.float32, tile_rows == MANY
    values, scales, offsets, groups, group, format = weight, weight, weight, 1, WHOLE_ROW, "dense"
    num_warps, block_k = 4, BLOCK_K_BYTES // rows.element_size()
    if isinstance(weight, PackedExperts):
        values = weight.values.view(torch.uint8) if weight.values.is_floating_point() and not rounded else weight.values
        scales, format = weight.scales, "rounded" if rounded else weight.format
        offsets = scales if weight.offsets is None else weight.offsets
        groups = scales.shape[2]
        if format == "mxfp4":
            group, block_k = weight.group_size, block_k if wide else MXFP4_BLOCK_K
        elif groups > 1 or format == "int4":
            group = weight.group_size
            block_k = min(block_k, group)
        num_warps = 8 if many else 4  # unpacking takes registers
    block_n = 128 if many and not wide else 64
    precision = "ieee" if wide else SHORT_NAMES[dtype] if format == "mxfp4" else "tf32"
    grouped_kernel[tiles.shape[1], triton.cdiv(size_n, block_n)](
        rows, row_scales, values, scales, offsets, scales if bias is None else bias, out, order, tiles, tiles.shape[1],
        size_n, size_k, groups, rows.stride(0), pairs // num_rows, *row_scales.stride(),
        FORMAT=format, GROUP=group, BIASED=bias is not None,
        BLOCK_M=tile_rows, BLOCK_N=block_n, BLOCK_K=block_k, PRECISION=precision, num_warps=num_warps, num_stages=3,
        **dependent_launch.options(rows.device),
    )  # fmt: skip
    return out


def multiplies_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_FLOAT8


def row_format(weight: Tensor | PackedExperts, dtype: torch.dtype) -> RowFormat | None:
    """Return the format to which rows of this dtype are rounded for a product with this weight; None if they are not
    rounded. As in linear layers, only rows in bfloat16 are rounded."""
    if not isinstance(weight, PackedExperts) or weight.activations != FP8 or weight.format != "float8":
        return None
    if dtype != torch.bfloat16 or not multiplies_float8(weight.values.device):
        return None
    if weight.scales.shape[2] == 1:
        return RowFormat(FP8)
    return RowFormat(FP8, weight.group_size) if weight.group_size in ROW_GROUPS else None


def activated(
    activation: Callable[[Tensor], Tensor], hidden: Tensor, format: RowFormat | None
) -> Tensor | QuantizedRows:
    """Return the activation of `hidden`, rounded to a format; in one launch if the activation is gated."""
    if format is None:
        return activation(hidden)
    for name, kernel in fused_quantize.GATED.items():
        if activation is activations.GATED[name]:
            return kernel(hidden, format)
    return quantize.quantize(activation(hidden), format)


def mix_experts(
    x: Tensor, gate_up: Tensor | PackedExperts, down: Tensor | PackedExperts, activation: Callable[[Tensor], Tensor],
    experts: Tensor, weights: Tensor, biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Compute the experts. The results of a token's experts are summed in the order of `experts`, in any batch.

    x: [tokens, hidden]; gate_up: [num_experts, 2 * intermediate, hidden]; down: [num_experts, hidden, intermediate];
    experts: [tokens, k] int64; weights: [tokens, k]; biases: [num_experts, outputs] each. Returns [tokens, hidden].
    """
    return combine(pair_products(x, gate_up, down, activation, experts, biases), weights)


def mix_some_experts(
    x: Tensor, gate_up: Tensor | PackedExperts, down: Tensor | PackedExperts, activation: Callable[[Tensor], Tensor],
    experts: Tensor, weights: Tensor, biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Compute the experts that this rank has. Others, whose number is `num_experts`, are left out of the sum."""
    mixed = pair_products(x, gate_up, down, activation, experts, biases)
    return combine(mixed, weights, own=experts < gate_up.shape[0])


def pair_products(
    x: Tensor, gate_up: Tensor | PackedExperts, down: Tensor | PackedExperts, activation: Callable[[Tensor], Tensor],
    experts: Tensor, biases: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """Return the product of each pair, [pairs, hidden]; undefined where another rank has the expert."""
    tile_rows = FEW if experts.numel() <= FEW * gate_up.shape[0] else MANY
    order, _, _, _, tiles = sort_pairs(experts, gate_up.shape[0], tile_rows)
    (first, second), format = biases or (None, None), row_format(gate_up, x.dtype)
    rows = x if format is None else quantize.quantize(x, format)
    hidden = grouped_linear(rows, gate_up, first, order, tiles, tile_rows)
    between = activated(activation, hidden, row_format(down, x.dtype))
    return grouped_linear(between, down, second, order, tiles, tile_rows)
