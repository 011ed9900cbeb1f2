"""Products with weights in MXFP4 (quantization/mxfp4.py), in Triton. Rows of 16 bits are multiplied by Triton's own
product with scales, whose conversion of a weight takes a third of the instructions of `load_tile`."""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(32)  # neighbouring inputs with one scale


@triton.jit
def multiply(
    a, acc, blocks, scales, expert, n, start, size_n, size_k, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Return acc plus the product of a [rows, BLOCK_K], in bf16 or fp16 (DTYPE), with an expert's weights. See
    `load_tile`."""
    rows = expert * size_n + n
    byte = start // 2 + tl.arange(0, BLOCK_K // 2)
    inside = (byte < size_k // 2)[:, None] & (n < size_n)[None, :]
    pairs = tl.load(blocks + rows[None, :] * (size_k // 2) + byte[:, None], mask=inside, other=0)
    group = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
    inside = (n < size_n)[:, None] & (group < size_k // GROUP)[None, :]
    exponents = tl.load(scales + rows[:, None] * (size_k // GROUP) + group[None, :], mask=inside, other=0)
    return tl.dot_scaled(a, None, DTYPE, pairs, exponents, "e2m1", acc, fast_math=True)


@triton.jit
def load_tile(
    blocks, scales, expert, n, start, size_n, size_k,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return an expert's weights [BLOCK_N, BLOCK_K], for outputs `n` and inputs from `start` on; 0 past the ends.

    blocks: [experts, size_n, size_k / 2], two numbers to a byte, the first in its low bits
    scales: [experts, size_n, size_k / 32]
    """
    rows = expert * size_n + n
    byte = start // 2 + tl.arange(0, BLOCK_K // 2)
    inside = (n < size_n)[:, None] & (byte < size_k // 2)[None, :]
    pair = tl.load(blocks + rows[:, None] * (size_k // 2) + byte[None, :], mask=inside, other=0).to(tl.int32)
    codes = tl.interleave(pair & 15, pair >> 4)
    group = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
    inside = (n < size_n)[:, None] & (group < size_k // GROUP)[None, :]
    exponent = tl.load(scales + rows[:, None] * (size_k // GROUP) + group[None, :], mask=inside, other=0).to(tl.int32)
    # a power of two made from its bits; those too small for a normal float32 become 0
    half_scale = (tl.maximum(exponent - 1, 0) << 23).to(tl.float32, bitcast=True)
    values = doubled(codes).to(tl.float32).reshape(BLOCK_N, BLOCK_K // GROUP, GROUP) * half_scale[:, :, None]
    return values.reshape(BLOCK_N, BLOCK_K).to(DTYPE)


@triton.jit
def doubled(codes):
    """Return twice the number that each 4-bit code stands for. It is a sign, two bits of exponent and one of
    fraction."""
    exponent = (codes >> 1) & 3
    magnitude = ((codes & 1) + tl.where(exponent > 0, 2, 0)) << tl.maximum(exponent - 1, 0)
    return tl.where(codes > 7, -magnitude, magnitude)
