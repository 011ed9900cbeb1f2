"""Reads tiles of experts' weights for the product in moe.py, and packs the weights that it can read."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.model.ops.gpu.experts import int4, mxfp4
from engine.model.quantization.weight import QuantizedWeight

GROUP_UNIT = 64  # groups of 8-bit weights must be multiples of it, since a tile has at most 64 inputs
FLOAT8_BIAS = tl.constexpr(2.0**120)  # corrects the exponent bias of float8_e4m3fn read as float32


@triton.jit
def load_tile(
    values, scales, offsets, expert, n, start, size_n, size_k, groups,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return an expert's weights [BLOCK_N, BLOCK_K], for outputs `n` and inputs from `start` on; 0 past the ends.

    See PackedExperts. float8 is read as uint8, since GPUs before Ada have no such type.
    """
    first = expert * size_n
    if FORMAT == "mxfp4":
        return mxfp4.load_tile(values, scales, expert, n, start, size_n, size_k, BLOCK_N, BLOCK_K, DTYPE)
    elif FORMAT == "int4":
        return int4.load_int4(
            values + first * (size_k // 2), scales + first * groups, offsets + first * groups,
            n, start, size_n, size_k, GROUP, BLOCK_K, DTYPE,
        )  # fmt: skip
    else:
        k = start + tl.arange(0, BLOCK_K)
        inside = (n < size_n)[:, None] & (k < size_k)[None, :]
        wide = tl.load(values + (first + n)[:, None] * size_k + k[None, :], mask=inside, other=0)
        if FORMAT == "float8":
            bits = wide.to(tl.int32)
            wide = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * FLOAT8_BIAS
        scale = tl.load(scales + (first + n) * groups + start // GROUP, mask=n < size_n, other=0.0)
        return (wide.to(tl.float32) * scale[:, None]).to(DTYPE)


def pack(weight: QuantizedWeight) -> tuple[Tensor, ...] | None:
    """Return an expert's values, scales and, for int4, offsets for PackedExperts; None if `load_tile` cannot read
    it."""
    if weight.bits == 4:
        return int4.pack(weight) if weight.group_size in int4.GROUPS else None
    if weight.zero is not None or (weight.scale.shape[1] > 1 and weight.group_size % GROUP_UNIT):
        return None
    return weight.values, weight.scale
