"""Rotates queries and keys of latent attention and writes its cache, in Triton. See `select_latent` in
ops/attention.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops.gpu import dependent_launch


@triton.jit
def rotated_pairs(x, inside, cos, sin, between, HALF_PAD: tl.constexpr):
    """Rotate the pairs of each row of `x` [rows, 1], pointers to its first value. between: distance from a pair's first
    value to its second: 1 if they are neighbours, else half a head. Returns the first values of all pairs, and the
    second ones: [rows, HALF_PAD] each."""
    i = tl.arange(0, HALF_PAD)[None, :]
    first = x + tl.where(between == 1, 2 * i, i)
    a, b = tl.load(first, mask=inside, other=0.0), tl.load(first + between, mask=inside, other=0.0)
    return (a * cos - b * sin).to(a.dtype), (b * cos + a * sin).to(a.dtype)


@triton.jit
def rotate_and_write_latent_kernel(
    out, q, c, k, weight, table, positions, cache, slots, eps,
    q_stride, q_head_stride, c_stride, k_stride, block_stride, between,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
    HEADS_PAD: tl.constexpr, RANK_PAD: tl.constexpr, HALF_PAD: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Rotate a token's q into the last ROPE values of its heads in `out` [tokens, HEADS, RANK + ROPE]. Normalize
    the token's latent c, rotate its k, and write both to the cache. Grid (tokens). Tokens with a negative slot are
    padding."""
    dependent_launch.begin(DEPENDENT)
    token, half = tl.program_id(0).to(tl.int64), ROPE // 2
    i, head = tl.arange(0, HALF_PAD)[None, :], tl.arange(0, HEADS_PAD)[:, None]
    angles = table + tl.load(positions + token) * ROPE
    cos = tl.load(angles + i, mask=i < half, other=0.0).to(tl.float32)
    sin = tl.load(angles + half + i, mask=i < half, other=0.0).to(tl.float32)
    inside = (head < HEADS) & (i < half)
    low, high = rotated_pairs(q + token * q_stride + head * q_head_stride, inside, cos, sin, between, HALF_PAD)
    target = out + (token * HEADS + head) * (RANK + ROPE) + RANK + i
    tl.store(target, low, mask=inside)
    tl.store(target + half, high, mask=inside)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    vector = cache + slot // PAGE * block_stride + slot % PAGE * SIZE
    d = tl.arange(0, RANK_PAD)
    latent = tl.load(c + token * c_stride + d, mask=d < RANK, other=0.0)
    wide = latent.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / RANK + eps)
    factor = tl.load(weight + d, mask=d < RANK, other=0.0).to(tl.float32)
    tl.store(vector + d, (wide.to(latent.dtype).to(tl.float32) * factor).to(latent.dtype), mask=d < RANK)
    only = tl.arange(0, 1)[:, None]
    inside = (only == 0) & (i < half)
    low, high = rotated_pairs(k + token * k_stride + only, inside, cos, sin, between, HALF_PAD)
    tl.store(vector + RANK + only + i, low, mask=inside)
    tl.store(vector + RANK + only + half + i, high, mask=inside)


def rotate_and_write_latent(
    out: Tensor, q: Tensor, c: Tensor, k: Tensor, norm: tuple[Tensor, float], table: Tensor, interleaved: bool,
    batch: Batch, layer: int,
) -> None:  # fmt: skip
    """Rotate q into the last values of out. Norm c, and write it and the rotated k to the cache.

    out: [tokens, heads, rank + rope_dim], contiguous; q: [tokens, heads, rope_dim]; c: [tokens, rank]; k: [tokens,
    rope_dim]; each head's or token's values contiguous. norm: weight and epsilon. interleaved: see `LatentConfig`.
    """
    (tokens, heads, _), cache, (rank, rope) = out.shape, batch.kv_cache, (c.shape[1], table.shape[1])
    rotate_and_write_latent_kernel[tokens,](
        out, q, c, k, norm[0], table, batch.positions, cache[0, layer], batch.slot_mapping, norm[1],
        q.stride(0), q.stride(1), c.stride(0), k.stride(0), cache.stride(0), 1 if interleaved else rope // 2,
        HEADS=heads, RANK=rank, ROPE=rope, PAGE=cache.shape[4], SIZE=cache.shape[5],
        HEADS_PAD=triton.next_power_of_2(heads), RANK_PAD=triton.next_power_of_2(rank),
        HALF_PAD=triton.next_power_of_2(rope // 2), **dependent_launch.options(out.device),
    )  # fmt: skip


@triton.jit
def write_kernel(
    latent, cache, slots, stride, block_stride,
    PAGE: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Write the latents of tokens to the cache. Grid (tokens). Tokens with a negative slot are padding."""
    dependent_launch.begin(DEPENDENT)
    token, d = tl.program_id(0).to(tl.int64), tl.arange(0, PAD)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    values = tl.load(latent + token * stride + d, mask=d < SIZE)
    tl.store(cache + slot // PAGE * block_stride + slot % PAGE * SIZE + d, values, mask=d < SIZE)


def write_latent(latent: Tensor, batch: Batch, layer: int) -> None:
    """Write latents to the cache. latent: [tokens, rank + rope_dim]."""
    cache, (tokens, size) = batch.kv_cache, latent.shape
    write_kernel[tokens,](
        latent, cache[0, layer], batch.slot_mapping, latent.stride(0), cache.stride(0),
        PAGE=cache.shape[4], SIZE=size, PAD=triton.next_power_of_2(size), **dependent_launch.options(latent.device),
    )  # fmt: skip
