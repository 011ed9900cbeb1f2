"""The product of a linear layer, and the sum of its parts, whose bits do not depend on other rows, in Triton.

A library chooses tiles by the number of rows, and may divide the inputs over programs if there are few rows. So the
order of a row's sums depends on the batch. Here one kernel with one tile size multiplies any number of rows, and a
program sums all inputs of its part in ascending order. Tile sizes are estimates. Has run under Triton's interpreter
only, not on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.ops.gpu.attention import hopper

BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 64
GROUP_M = 8  # tiles of rows that read the same weights one after the other, from the L2
SUM_BLOCK = 1024


@triton.jit(do_not_specialize=["rows", "stride"])
def linear_kernel(
    x, weight, bias, out, rows, stride, outputs,
    INPUTS: tl.constexpr, PART: tl.constexpr, BIAS: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of x[:, part] @ weight[:, part].T into out[part]. Grid (tiles, parts). x: [rows, INPUTS];
    weight: [outputs, INPUTS]; out: [parts, rows, outputs]; PART: inputs of a part."""
    tile, part = tl.program_id(0), tl.program_id(1)
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    m = (first_m + within % group_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // group_m * BLOCK_N + tl.arange(0, BLOCK_N)
    x += part * PART + m.to(tl.int64)[:, None] * stride
    weight += part * PART + n.to(tl.int64)[:, None] * INPUTS
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, PART, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)[None, :]
        left = tl.load(x + k, mask=(m < rows)[:, None] & (k < PART), other=0.0)
        right = tl.load(weight + k, mask=(n < outputs)[:, None] & (k < PART), other=0.0)
        acc = tl.dot(left, tl.trans(right), acc)
    if BIAS:
        acc += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    target = out + (part.to(tl.int64) * rows + m.to(tl.int64))[:, None] * outputs + n[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < outputs)[None, :])


class Product:
    """The product with a weight, [outputs, inputs]. dtype: of the result."""

    def __init__(self, weight: Tensor, dtype: torch.dtype):
        self.weight, self.dtype = weight, dtype

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [tokens, inputs], add bias [outputs]. Returns [tokens, outputs]."""
        return linear_parts(x.to(self.weight.dtype), self.weight, 1, bias, self.dtype)[0]


def linear_parts(
    x: Tensor, weight: Tensor, parts: int, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the product of each of `parts` equal parts of the inputs, [parts, tokens, outputs]. dtype: of the result;
    None for x's."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, (outputs, inputs) = len(x), weight.shape
    out = torch.empty(parts, rows, outputs, dtype=dtype or x.dtype, device=x.device)
    linear_kernel[triton.cdiv(rows, BLOCK_M) * triton.cdiv(outputs, BLOCK_N), parts](
        x, weight, weight if bias is None else bias, out, rows, x.stride(0), outputs,
        INPUTS=inputs, PART=inputs // parts, BIAS=bias is not None, GROUP_M=GROUP_M,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=8, num_stages=4 if hopper(x.device) else 3,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["size", "step"])
def tree_sum_kernel(x, out, size, step, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add PARTS tensors of `size` values, whose starts are `step` apart: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
    Grid (size / BLOCK)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, x, step = i < size, x + i, tl.cast(step, tl.int64)
    total = tl.load(x, mask=inside).to(tl.float32)
    if PARTS > 1:
        total += tl.load(x + step, mask=inside).to(tl.float32)
    if PARTS > 2:
        c, d = tl.load(x + 2 * step, mask=inside), tl.load(x + 3 * step, mask=inside)
        total += c.to(tl.float32) + d.to(tl.float32)
    if PARTS > 4:
        e, f = tl.load(x + 4 * step, mask=inside), tl.load(x + 5 * step, mask=inside)
        g, h = tl.load(x + 6 * step, mask=inside), tl.load(x + 7 * step, mask=inside)
        total += (e.to(tl.float32) + f.to(tl.float32)) + (g.to(tl.float32) + h.to(tl.float32))
    tl.store(out + i, total.to(out.dtype.element_ty), mask=inside)


def tree_sum(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Sum the parts of one tensor from `linear_parts`: 1, 2, 4 or 8."""
    first = parts[0]
    out = torch.empty(first.shape, dtype=dtype, device=first.device)
    tree_sum_kernel[triton.cdiv(first.numel(), SUM_BLOCK),](
        first, out, first.numel(), first.numel(), PARTS=len(parts), BLOCK=SUM_BLOCK
    )  # fmt: skip
    return out
