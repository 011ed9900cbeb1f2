"""Rotary embedding on a CPU. `rotate` works in place: q and k come from their projection and are not read elsewhere."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops.cpu.kernel import (
    TokenCount,
    as_i64,
    device_function,
    each_dtype,
    load,
    store,
    work,
)
from engine.model.ops.cpu.norm import rms_norm

TOKENS = 4  # tokens that a thread takes at a time


@device_function
def rotate_head(x: Any, first: int, table: Any, angles: int, half: int) -> None:
    """Rotate the pairs of x[first : first + 2 * half] by table[angles : angles + 2 * half]."""
    for i in range(half):
        cos, sin = load(table, angles + i), load(table, angles + half + i)
        a, b = load(x, first + i), load(x, first + half + i)
        store(x, first + i, a * cos - b * sin)
        store(x, first + half + i, b * cos + a * sin)


@device_function
def rotate_rows(cast: Any, args: Any) -> None:
    x, table, positions = cast(args[1]), cast(args[2]), as_i64(args[3])
    tokens, stride, heads, head_dim, half = args[4], args[5], args[6], args[7], args[8]
    for token in work(args, tokens, TOKENS):
        angles = positions[token] * 2 * half
        for head in range(heads):
            rotate_head(x, token * stride + head * head_dim, table, angles, half)


ROTATE = each_dtype(rotate_rows)


def rotate(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    tokens, heads, head_dim = x.shape
    half = table.shape[1] // 2
    ROTATE.launch(
        x.dtype, -(-tokens // TOKENS), x, table, positions, TokenCount(tokens), x.stride(0), heads, head_dim, half
    )
    return x


@device_function
def rotate_pairs(x: Any, source: Any, out: Any, target: Any, table: Any, angles: Any, half: Any, between: Any) -> None:
    """Rotate the pairs of x from `source` on, and write them half a head apart. between: distance from a pair's first
    value to its second: 1 if they are neighbours, else half."""
    step = 2 if between == 1 else 1
    for i in range(half):
        cos, sin = load(table, angles + i), load(table, angles + half + i)
        a, b = load(x, source + step * i), load(x, source + step * i + between)
        store(out, target + i, a * cos - b * sin)
        store(out, target + half + i, b * cos + a * sin)


@device_function
def rotate_and_write_latents(cast: Any, args: Any) -> None:
    """args: out, q, c, k, table, positions, cache, slots, tokens, heads, rank, half of what is rotated, distance of a
    pair's values, strides of q from token to token and from head to head, strides of c and k, the cache's block size,
    block stride and vector size."""
    out, q, c, k, table = cast(args[1]), cast(args[2]), cast(args[3]), cast(args[4]), cast(args[5])
    positions, cache, slots = as_i64(args[6]), cast(args[7]), as_i64(args[8])
    tokens, heads, rank, half, between, block_size = args[9], args[10], args[11], args[12], args[13], args[18]
    width = rank + 2 * half
    for token in work(args, tokens, TOKENS):
        angles, slot = positions[token] * 2 * half, slots[token]
        for head in range(heads):
            target = (token * heads + head) * width + rank
            rotate_pairs(q, token * args[14] + head * args[15], out, target, table, angles, half, between)
        if slot >= 0:
            target = slot // block_size * args[19] + slot % block_size * args[20]
            for i in range(rank):
                cache[target + i] = c[token * args[16] + i]
            rotate_pairs(k, token * args[17], cache, target + rank, table, angles, half, between)


WRITE_LATENT = each_dtype(rotate_and_write_latents)


def rotate_and_write_latent(
    out: Tensor, q: Tensor, c: Tensor, k: Tensor, norm: tuple[Tensor, float], table: Tensor, interleaved: bool,
    batch: Batch, layer: int,
) -> None:  # fmt: skip
    """Rotate q into the last values of out. Norm c, and write it and the rotated k to the cache.

    out: [tokens, heads, rank + rope_dim], contiguous; q: [tokens, heads, rope_dim]; c: [tokens, rank]; k: [tokens,
    rope_dim]; each head's or token's values contiguous. norm: weight and epsilon. interleaved: see `LatentConfig`.
    """
    (tokens, heads, _), cache, half = out.shape, batch.kv_cache, table.shape[1] // 2
    c = rms_norm(c, *norm, 0.0)
    WRITE_LATENT.launch(
        out.dtype, -(-tokens // TOKENS), out, q, c, k, table, batch.positions, cache[0, layer], batch.slot_mapping,
        TokenCount(tokens), heads, c.shape[1], half, 1 if interleaved else half, q.stride(0), q.stride(1), c.stride(0),
        k.stride(0), cache.shape[4], cache.stride(0), cache.shape[5],
    )  # fmt: skip
