"""Products with int4 weights, in Triton. Up to MOST rows are multiplied with the weight as stored, which stays in the
L2 cache for all tiles of rows. For more rows, the weight is dequantized first and then multiplied by cuBLAS, which
costs one more pass over the weight.

Has run under Triton's interpreter and compiles for Ampere and Hopper, but has not run on a GPU yet.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from engine.model.ops.gpu import dependent_launch
from engine.model.ops.gpu.attention import shared_bytes
from engine.model.quantization.weight import QuantizedWeight

MOST = 512  # rows; with more, as in prompts, it should be faster to dequantize the weight first
TILES = ((16, 32), (64, 32), (128, 64))  # rows and outputs; used is the first that holds all rows, else the last
BLOCK_K = 128
MOST_STAGES = 4


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


@triton.jit(do_not_specialize=["rows"])
def int4_linear_kernel(
    x, values, scales, offsets, out, rows, size_n, size_k, stride_x,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Multiply BLOCK_M rows with BLOCK_N outputs. Grid (rows / BLOCK_M, size_n / BLOCK_N): neighbouring programs share
    a weight."""
    dependent_launch.begin(DEPENDENT)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, size_k, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + m[:, None] * stride_x + k[None, :], mask=(m < rows)[:, None], other=0.0)
        b = load_int4(values, scales, offsets, n, start, size_n, size_k, GROUP, BLOCK_K, a.dtype)
        acc = tl.dot(a, b.trans(), acc)
    target = out + m[:, None] * size_n + n[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < size_n)[None, :])


@triton.jit
def dequantize_kernel(
    values, scales, offsets, out, size_n, size_k,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Dequantize a tile of the weight. Grid (size_n / BLOCK_N, size_k / BLOCK_K)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * BLOCK_K
    weight = load_int4(values, scales, offsets, n, start, size_n, size_k, GROUP, BLOCK_K, out.dtype.element_ty)
    target = out + n.to(tl.int64)[:, None] * size_k + start + tl.arange(0, BLOCK_K)[None, :]
    tl.store(target, weight, mask=(n < size_n)[:, None])


def pack(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values, scales and offsets that `load_int4` reads."""
    codes, scale = (weight.values + 8).to(torch.uint8), weight.scale.contiguous()
    offset = -8.0 * scale if weight.zero is None else -(8.0 + weight.zero) * scale
    return codes[:, 1::2] << 4 | codes[:, ::2], scale, offset


def num_stages(block_m: int, block_n: int, block_k: int, shared: int) -> int:
    """Return the stages of the kernel's pipeline that fit into `shared` bytes of shared memory, at least 2.

    A stage holds a tile of rows, in 16 bits, and one of packed weights. A pipeline of n stages needs shared memory for
    n - 1 of them. GPUs with 227 KiB need memory for all n, but there MOST_STAGES fit anyway.
    """
    stage = block_m * block_k * 2 + block_n * block_k // 2
    return max(2, min(MOST_STAGES, 1 + shared // stage))


class Int4:
    """A product with an int4 weight that has a scale for every 32 to 256 inputs."""

    def __init__(self, weight: QuantizedWeight):
        self.size, self.group_size = weight.values.shape, weight.group_size
        self.values, self.scale, self.offset = pack(weight)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [tokens, inputs], add bias [outputs]. Returns [tokens, outputs] of x's dtype."""
        (outputs, inputs), rows = self.size, len(x)
        block_m, block_n = next((tile for tile in TILES if tile[0] >= rows), TILES[-1])
        packed, blocks = (self.values, self.scale, self.offset), {"GROUP": self.group_size, "BLOCK_N": block_n}
        block_k = min(self.group_size, BLOCK_K)
        if rows > MOST:
            weight = torch.empty(self.size, dtype=x.dtype, device=x.device)
            dequantize_kernel[triton.cdiv(outputs, block_n), inputs // block_k](
                *packed, weight, outputs, inputs, **blocks, BLOCK_K=block_k
            )  # fmt: skip
            return F.linear(x, weight, bias)
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        int4_linear_kernel[triton.cdiv(rows, block_m), triton.cdiv(outputs, block_n)](
            x, *packed, out, rows, outputs, inputs, x.stride(0),
            **blocks, BLOCK_M=block_m, BLOCK_K=block_k, num_warps=8 if block_m > 64 else 4,
            num_stages=num_stages(block_m, block_n, block_k, shared_bytes(x.device)),
            **dependent_launch.options(x.device),
        )  # fmt: skip
        return out if bias is None else out + bias
