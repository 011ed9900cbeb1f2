"""Batches for the attention kernels, on a GPU where there is one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.model.batch import Batch, split

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOAT8 = torch.float8_e4m3fn
LAYERS = 2


def image_end(cached: int, count: int, position: int) -> int:
    """`Batch.span_ends` of a token if the middle of each chunk is an image."""
    first, end = cached + count // 4, cached + count * 3 // 4
    return end if first <= position < end else position + 1


@dataclass(frozen=True)
class Case:
    """sequences: (tokens cached before, tokens in this step); (0, 0) is padding, one row long."""

    sequences: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    chunk: int | None = None
    images: bool = False
    """Whether the middle of each chunk is an image whose tokens see each other."""
    rotary_dim: int | None = None
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None

    def but(self, **changes: object) -> Case:
        return replace(self, **changes)

    def scores(self) -> dict[str, Any]:
        """The keywords of `paged_attention`."""
        sinks = torch.linspace(-1, 2, self.heads).to(DEVICE, self.dtype) if self.sinks else None
        return {"softcap": self.softcap, "sinks": sinks, "chunk": self.chunk}

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Batch]:
        """q, k, v of this step, as parts of one projection, and the batch, whose cache has NaN where nothing was
        written before."""
        generator = torch.Generator().manual_seed(len(self.sequences))
        counts = [max(new, 1) for _, new in self.sequences]
        kv_lens = [cached + new for cached, new in self.sequences]
        width = max(-(-max(kv_lens) // self.block_size), 1) + 1
        blocks = torch.randperm(len(counts) * width, generator=generator).int()
        table = blocks.view(len(counts), width)
        slots, positions, ends = [], [], []
        cache = torch.randn(
            len(blocks), LAYERS, 2, self.kv_heads, self.block_size, self.head_dim, generator=generator
        ).to(self.cache_dtype or self.dtype)
        bits = cache.view(torch.uint8)
        for row, (cached, new) in zip(table.tolist(), self.sequences, strict=True):
            for position in range(cached, width * self.block_size):
                bits[row[position // self.block_size], ..., position % self.block_size, :] = 0xFF  # NaN in every type
            for position in range(cached, cached + new):
                slots.append(row[position // self.block_size] * self.block_size + position % self.block_size)
                positions.append(position)
                ends.append(image_end(cached, new, position))
            if not new:
                slots.append(-1)
                positions.append(0)
                ends.append(1)
        single, chunks = split(counts, kv_lens)
        scales = torch.tensor([[0.5, 2.0], [0.02, 0.03]]) if self.cache_dtype == FLOAT8 else None
        batch = Batch(
            positions=torch.tensor(positions, device=DEVICE),
            slot_mapping=torch.tensor(slots, device=DEVICE),
            query_start=torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE),
            kv_len=torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE),
            block_table=table.to(DEVICE),
            kv_cache=cache.to(DEVICE),
            single=single.to(DEVICE),
            chunks=chunks,
            kv_scales=None if scales is None else scales.to(DEVICE),
            span_ends=torch.tensor(ends, dtype=torch.int32, device=DEVICE) if self.images else None,
        )
        merged = torch.randn(sum(counts), self.heads + 2 * self.kv_heads, self.head_dim, generator=generator)
        q, k, v = merged.to(DEVICE, self.dtype).split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return q, k, v, batch


def latent_inputs(
    sequences: list[tuple[int, int]],
    heads: int,
    rank: int,
    rope: int,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
) -> tuple[Tensor, Tensor, Batch]:
    """Queries [tokens, heads, rank + rope] and vectors [tokens, rank + rope] of this step, and the batch."""
    case = Case(sequences, kv_heads=1, head_dim=rank + rope, heads=heads, dtype=dtype, block_size=block_size)
    q, _, _, batch = case.inputs()
    batch.kv_cache = batch.kv_cache[:, :, :1].contiguous()
    latent = torch.randn(len(q), rank + rope, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    return q, latent, batch
