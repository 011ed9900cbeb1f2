"""Normalises and rotates q and k, and writes K and V to the cache, in one Triton kernel. See ops/attention.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops.gpu import dependent_launch
from engine.model.ops.norm import HeadNorms


@triton.jit
def normed(x, scale, weight, inside, shift, SHIFTED: tl.constexpr):
    """Apply RMSNorm's scale and weight to part of a head, rounded as in ops/gpu/norm.py."""
    factor = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    wide = x.to(tl.float32) * scale
    wide = wide * (shift + factor) if SHIFTED else wide.to(x.dtype).to(tl.float32) * factor
    return wide.to(x.dtype)


@triton.jit
def rotated(
    x, head_stride, cos_sin, head, weight, eps, shift,
    NORMED: tl.constexpr, SHIFTED: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, HALF_PAD: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """Rotate one token's heads, after their norm if NORMED. Return both halves [heads, HALF_PAD] in x's dtype and a
    mask of their elements in bounds; then the values that are not rotated [heads, HEAD_PAD], and their mask."""
    i, d = tl.arange(0, HALF_PAD)[None, :], tl.arange(0, HEAD_PAD)[None, :]
    half: tl.constexpr = ROTARY_DIM // 2
    inside = (head < HEADS) & (i < half)
    rest_inside = (head < HEADS) & (d >= ROTARY_DIM) & (d < HEAD_DIM)
    x += head * head_stride
    cos = tl.load(cos_sin + i, mask=i < half).to(tl.float32)
    sin = tl.load(cos_sin + half + i, mask=i < half).to(tl.float32)
    a = tl.load(x + i, mask=inside, other=0.0)
    b = tl.load(x + i + half, mask=inside, other=0.0)
    rest = b
    if ROTARY_DIM < HEAD_DIM:
        rest = tl.load(x + d, mask=rest_inside, other=0.0)
    if NORMED:
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        squares = tl.sum(wide_a * wide_a, 1) + tl.sum(wide_b * wide_b, 1)
        if ROTARY_DIM < HEAD_DIM:
            squares += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        a = normed(a, scale, weight + i, i < half, shift, SHIFTED)
        b = normed(b, scale, weight + half + i, i < half, shift, SHIFTED)
        if ROTARY_DIM < HEAD_DIM:
            rest = normed(rest, scale, weight + d, d < HEAD_DIM, shift, SHIFTED)
    return (a * cos - b * sin).to(a.dtype), (b * cos + a * sin).to(a.dtype), inside, rest, rest_inside


@triton.jit
def to_cache(x, scale, QUANTIZED: tl.constexpr, dtype: tl.constexpr):
    """Convert x to the cache's dtype, dividing and rounding as the oracle does, so that both agree to the bit."""
    if QUANTIZED:
        x = tl.div_rn(x.to(tl.float32), tl.zeros(x.shape, tl.float32) + scale)
        x = tl.clamp(x, -448.0, 448.0)  # the largest of float8_e4m3fn
    return x.to(dtype)


@triton.jit
def rotate_and_write_kernel(
    q, k, v, out, table, positions, cache, slots, kv_scales, q_weight, k_weight, eps, shift,
    q_stride, q_head_stride, k_stride, v_stride, block_stride,
    NORMED: tl.constexpr, SHIFTED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, QUANTIZED: tl.constexpr, HEADS_PAD: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr, HALF_PAD: tl.constexpr, HEAD_PAD: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Rotate q into `out` [tokens, HEADS, HEAD_DIM], rotate k, and write K and V. Grid (tokens). Tokens with a negative
    slot are padding and write no KV."""
    dependent_launch.begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = ROTARY_DIM // 2
    cos_sin = table + tl.load(positions + token) * ROTARY_DIM
    head, d = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, HEAD_PAD)[None, :]
    i = tl.arange(0, HALF_PAD)[None, :]
    low, high, inside, rest, rest_inside = rotated(
        q + token * q_stride, q_head_stride, cos_sin, head, q_weight, eps, shift,
        NORMED, SHIFTED, HEADS, HEAD_DIM, ROTARY_DIM, HALF_PAD, HEAD_PAD,
    )  # fmt: skip
    target = out + (token * HEADS + head) * HEAD_DIM
    tl.store(target + i, low, mask=inside)
    tl.store(target + half + i, high, mask=inside)
    if ROTARY_DIM < HEAD_DIM:
        tl.store(target + d, rest, mask=rest_inside)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    k_scale, v_scale = 1.0, 1.0
    if QUANTIZED:
        k_scale, v_scale = tl.load(kv_scales), tl.load(kv_scales + 1)
    dtype: tl.constexpr = cache.dtype.element_ty
    kv_head = tl.arange(0, KV_HEADS_PAD)[:, None]
    low, high, inside, rest, rest_inside = rotated(
        k + token * k_stride, HEAD_DIM, cos_sin, kv_head, k_weight, eps, shift,
        NORMED, SHIFTED, KV_HEADS, HEAD_DIM, ROTARY_DIM, HALF_PAD, HEAD_PAD,
    )  # fmt: skip
    heads = cache + slot // PAGE * block_stride + slot % PAGE * HEAD_DIM + kv_head * (PAGE * HEAD_DIM)
    tl.store(heads + i, to_cache(low, k_scale, QUANTIZED, dtype), mask=inside)
    tl.store(heads + half + i, to_cache(high, k_scale, QUANTIZED, dtype), mask=inside)
    if ROTARY_DIM < HEAD_DIM:
        tl.store(heads + d, to_cache(rest, k_scale, QUANTIZED, dtype), mask=rest_inside)
    inside = (kv_head < KV_HEADS) & (d < HEAD_DIM)
    v = tl.load(v + token * v_stride + kv_head * HEAD_DIM + d, mask=inside)
    tl.store(heads + KV_HEADS * PAGE * HEAD_DIM + d, to_cache(v, v_scale, QUANTIZED, dtype), mask=inside)


def rotate_and_write(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, batch: Batch, layer: int, norms: HeadNorms | None = None
) -> Tensor:
    """Rotate q and k, and write K and V to the cache. Return q rotated and contiguous, as libraries need it.

    q: [tokens, heads, head_dim], the last dimension contiguous; k, v: [tokens, kv_heads, head_dim], each token's values
    contiguous; table: [positions, rotary_dim].
    """
    cache = batch.kv_cache
    _, _, _, kv_heads, page, head_dim = cache.shape
    rotary_dim = table.shape[1]
    kv_scales = cache if batch.kv_scales is None else batch.kv_scales[layer]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q_weight, k_weight, eps, shift = norms or HeadNorms(q, q, 0.0, 0.0)
    rotate_and_write_kernel[len(k),](
        q, k, v, out, table, batch.positions, cache[0, layer], batch.slot_mapping, kv_scales,
        q_weight, k_weight, eps, shift, q.stride(0), q.stride(1), k.stride(0), v.stride(0), cache.stride(0),
        NORMED=norms is not None, SHIFTED=shift != 0.0, HEADS=q.shape[1], KV_HEADS=kv_heads, PAGE=page,
        HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim, QUANTIZED=batch.kv_scales is not None,
        HEADS_PAD=triton.next_power_of_2(q.shape[1]), KV_HEADS_PAD=triton.next_power_of_2(kv_heads),
        HALF_PAD=triton.next_power_of_2(rotary_dim // 2), HEAD_PAD=triton.next_power_of_2(head_dim),
        **dependent_launch.options(q.device),
    )  # fmt: skip
    return out
