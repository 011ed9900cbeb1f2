"""Rotates q and k by their positions and writes K and V to the cache, in one Triton kernel. See ops/attention.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.model.batch import Batch


@triton.jit
def rotated(
    x, cos_sin, head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    """Rotate one token's heads: both halves [heads, HALF_PAD] in x's dtype, their offsets, and which are in bounds."""
    i = tl.arange(0, HALF_PAD)[None, :]
    half: tl.constexpr = ROTARY_DIM // 2
    inside = (head < HEADS) & (i < half)
    offset = head * HEAD_DIM + i
    cos = tl.load(cos_sin + i, mask=i < half).to(tl.float32)
    sin = tl.load(cos_sin + half + i, mask=i < half).to(tl.float32)
    a = tl.load(x + offset, mask=inside)
    b = tl.load(x + offset + half, mask=inside)
    low = (a * cos - b * sin).to(a.dtype)
    high = (b * cos + a * sin).to(a.dtype)
    return low, high, offset, inside


@triton.jit
def to_cache(x, scale, QUANTIZED: tl.constexpr, dtype: tl.constexpr):
    """Convert x to the cache's dtype, dividing and rounding as the oracle does, so that they agree to the bit."""
    if QUANTIZED:
        x = tl.div_rn(x.to(tl.float32), tl.zeros(x.shape, tl.float32) + scale)
        x = tl.clamp(x, -448.0, 448.0)  # the largest of float8_e4m3fn
    return x.to(dtype)


@triton.jit
def rotate_and_write_kernel(
    q, k, v, table, positions, cache, slots, kv_scales, q_stride, k_stride, v_stride, block_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    QUANTIZED: tl.constexpr, HEADS_PAD: tl.constexpr, KV_HEADS_PAD: tl.constexpr, HALF_PAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (tokens). q is rotated in place. Tokens with a negative slot are padding and write no KV."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = ROTARY_DIM // 2
    cos_sin = table + tl.load(positions + token) * ROTARY_DIM
    head = tl.arange(0, HEADS_PAD)[:, None]
    q += token * q_stride
    low, high, offset, inside = rotated(q, cos_sin, head, HEADS, HEAD_DIM, ROTARY_DIM, HALF_PAD)
    tl.store(q + offset, low, mask=inside)
    tl.store(q + offset + half, high, mask=inside)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    k_scale, v_scale = 1.0, 1.0
    if QUANTIZED:
        k_scale, v_scale = tl.load(kv_scales), tl.load(kv_scales + 1)
    dtype: tl.constexpr = cache.dtype.element_ty
    kv_head = tl.arange(0, KV_HEADS_PAD)[:, None]
    k += token * k_stride
    low, high, offset, inside = rotated(k, cos_sin, kv_head, KV_HEADS, HEAD_DIM, ROTARY_DIM, HALF_PAD)
    heads = cache + slot // PAGE * block_stride + slot % PAGE * HEAD_DIM + kv_head * (PAGE * HEAD_DIM)
    target = heads + tl.arange(0, HALF_PAD)[None, :]
    tl.store(target, to_cache(low, k_scale, QUANTIZED, dtype), mask=inside)
    tl.store(target + half, to_cache(high, k_scale, QUANTIZED, dtype), mask=inside)
    d = tl.arange(0, HEAD_PAD)[None, :]
    inside = (kv_head < KV_HEADS) & (d < HEAD_DIM)
    offset = kv_head * HEAD_DIM + d
    if ROTARY_DIM < HEAD_DIM:
        rest = inside & (d >= ROTARY_DIM)
        tl.store(heads + d, to_cache(tl.load(k + offset, mask=rest), k_scale, QUANTIZED, dtype), mask=rest)
    v = tl.load(v + token * v_stride + offset, mask=inside)
    tl.store(heads + KV_HEADS * PAGE * HEAD_DIM + d, to_cache(v, v_scale, QUANTIZED, dtype), mask=inside)


def rotate_and_write(q: Tensor, k: Tensor, v: Tensor, table: Tensor, batch: Batch, layer: int) -> Tensor:
    cache = batch.kv_cache
    _, _, _, kv_heads, page, head_dim = cache.shape
    rotary_dim = table.shape[1]
    kv_scales = cache if batch.kv_scales is None else batch.kv_scales[layer]
    rotate_and_write_kernel[len(k),](
        q, k, v, table, batch.positions, cache[0, layer], batch.slot_mapping, kv_scales,
        q.stride(0), k.stride(0), v.stride(0), cache.stride(0),
        HEADS=q.shape[1], KV_HEADS=kv_heads, PAGE=page, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim,
        QUANTIZED=batch.kv_scales is not None, HEADS_PAD=triton.next_power_of_2(q.shape[1]),
        KV_HEADS_PAD=triton.next_power_of_2(kv_heads), HALF_PAD=triton.next_power_of_2(rotary_dim // 2),
        HEAD_PAD=triton.next_power_of_2(head_dim),
    )  # fmt: skip
    return q
