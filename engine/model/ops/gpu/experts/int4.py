"""Reads weights in int4, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.quantization.weight import QuantizedWeight

GROUPS = (32, 64, 128, 256)  # numbers of inputs with a common scale that `load_int4` can read


@triton.jit
def load_int4(
    values, scales, offsets, n, start, size_n, size_k,
    GROUP: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the weights [len(n), BLOCK_K] for outputs `n` and inputs from `start` on, which must be in one group.

    values: [size_n, size_k / 2], two codes to a byte, the first in its low bits; a weight is code * scale + offset
    scales, offsets: [size_n, size_k / GROUP]
    """
    here = n < size_n
    byte = start // 2 + tl.arange(0, BLOCK_K // 2)
    pair = tl.load(values + n[:, None] * (size_k // 2) + byte[None, :], mask=here[:, None], other=0).to(tl.int32)
    codes = tl.interleave(pair & 15, pair >> 4).to(tl.float32)
    group = n * (size_k // GROUP) + start // GROUP
    scale, offset = tl.load(scales + group, mask=here, other=0.0), tl.load(offsets + group, mask=here, other=0.0)
    return (codes * scale[:, None] + offset[:, None]).to(DTYPE)


def pack(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values, scales and offsets that `load_int4` reads."""
    codes, scale = (weight.values + 8).to(torch.uint8), weight.scale.contiguous()
    offset = -8.0 * scale if weight.zero is None else -(8.0 + weight.zero) * scale
    return codes[:, 1::2] << 4 | codes[:, ::2], scale, offset
