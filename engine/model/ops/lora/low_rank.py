"""Adds low-rank adapters to the product of a linear layer: LoRA, arXiv:2106.09685, section 4.1.

add(outs, x, weights, rows): outs[p] += B (A_p x_p) in each row with an adapter. A and B are those of the row's slot; p
    is the part of the inputs whose product is outs[p] (there is one part, unless sums have a fixed order)
    x: [tokens, inputs]; outs: [tokens, outputs or more]; changed in place. A row without an adapter is not touched.

Sums are in float32, and A_p x_p is rounded to the format of x, as in PEFT. A row has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.model.low_rank import AdapterRows, LowRankWeights, as_matrix
from engine.model.ops import dispatch

Add = Callable[[Sequence[Tensor], Tensor, LowRankWeights, AdapterRows], None]


def select(dtype: torch.dtype, device: torch.device) -> Add:
    if dispatch.cpu_kernels(dtype, device):
        from engine.model.ops.cpu.lora import low_rank as cpu

        cpu.SHRINK.compile(dtype)  # now, and not in the first step
        cpu.EXPAND.compile(dtype)
        return cpu.add
    if dispatch.gpu_kernels(dtype, device):
        from engine.model.ops.gpu import low_rank as gpu

        return gpu.add
    return add_plain


def add_plain(outs: Sequence[Tensor], x: Tensor, weights: LowRankWeights, rows: AdapterRows) -> None:
    """Add row by row."""
    for slot, tile in rows.tiles() if rows.any else ():
        rank = int(weights.ranks[slot])
        whole_a, whole_b = as_matrix(weights.a[slot]), as_matrix(weights.b[slot])
        for row in tile if rank else ():
            for out, part, a in zip(outs, x[row].chunk(len(outs)), whole_a.chunk(len(outs)), strict=True):
                shrunk = (part.float() @ a.float()).to(x.dtype).float().view(weights.slices, weights.rank)[:, :rank]
                for start, size, slice_, column in weights.blocks.tolist():
                    b = whole_b[:rank, column : column + size].float()
                    out[row, start : start + size] = out[row, start : start + size].float() + shrunk[slice_] @ b
