"""Paged attention on a CPU.

A sequence that computes one token (decode) is attended page by page, where its KV lies, with a running softmax
(FlashAttention, arXiv:2205.14135, section 3.1); the work is shared out by sequence and KV head. A chunk of several
tokens has enough work per byte for its KV to be gathered once and given to torch's flash kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.ops import attention_plain
from engine.ops.cpu.kernel import (
    Kernel,
    as_bf16,
    as_f32,
    as_i32,
    as_i64,
    device_function,
    exp,
    kernel,
    load,
    store,
    take,
)

TOKENS = 8  # whose KV a thread writes at a time
NO_WINDOW = 2**62
LOWEST = np.float32(-1e30)  # a score that counts as none; infinities are not safe under fast math


@device_function
def write_rows(cast: Any, args: Any) -> None:
    k, v, cache, slots = cast(args[1]), cast(args[2]), cast(args[3]), as_i64(args[4])
    tokens, k_stride, v_stride, kv_heads = args[5], args[6], args[7], args[8]
    block_size, head_dim, block_stride = args[9], args[10], args[11]
    head_stride = block_size * head_dim
    while True:
        first = take(args, TOKENS)
        if first >= tokens:
            break
        for token in range(first, min(first + TOKENS, tokens)):
            slot = slots[token]
            base = slot // block_size * block_stride + slot % block_size * head_dim
            for head in range(kv_heads):
                k_from, v_from = token * k_stride + head * head_dim, token * v_stride + head * head_dim
                k_to = base + head * head_stride
                v_to = k_to + kv_heads * head_stride
                for i in range(head_dim):
                    cache[k_to + i] = k[k_from + i]
                    cache[v_to + i] = v[v_from + i]


@kernel
def write_bf16(args: Any) -> None:
    write_rows(as_bf16, args)


@kernel
def write_f32(args: Any) -> None:
    write_rows(as_f32, args)


WRITE = Kernel(write_bf16, write_f32)


def write_kv(k: Tensor, v: Tensor, batch: Batch, layer: int) -> None:
    cache = batch.kv_cache
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    items = -(-k.shape[0] // TOKENS)
    WRITE.launch(
        k.dtype, items, k, v, cache[0, layer], batch.slot_mapping,
        k.shape[0], k.stride(0), v.stride(0), kv_heads, block_size, head_dim, cache.stride(0),
    )  # fmt: skip


@device_function
def attend_rows(cast: Any, args: Any) -> None:
    q, cache, out, constants = cast(args[1]), cast(args[2]), cast(args[3]), as_f32(args[4])
    sequences, query_start, kv_lens, tables = as_i32(args[5]), as_i32(args[6]), as_i32(args[7]), as_i32(args[8])
    items, table_stride, q_stride, out_stride = args[9], args[10], args[11], args[12]
    kv_heads, group, block_size, head_dim, block_stride, window = (
        args[13], args[14], args[15], args[16], args[17], args[18],
    )  # fmt: skip
    head_stride = block_size * head_dim
    scale = constants[0]
    queries = np.empty((group, head_dim), np.float32)
    sums = np.empty((group, head_dim), np.float32)
    scores = np.empty((group, block_size), np.float32)
    tops = np.empty(group, np.float32)
    totals = np.empty(group, np.float32)
    while True:
        item = take(args, 1)
        if item >= items * kv_heads:
            break
        seq, head = sequences[item // kv_heads], item % kv_heads
        row, kv_len = np.int64(query_start[seq]), np.int64(kv_lens[seq])
        for g in range(group):
            tops[g] = LOWEST
            totals[g] = np.float32(0.0)
            source = row * q_stride + (head * group + g) * head_dim
            for i in range(head_dim):
                queries[g, i] = load(q, source + i) * scale
                sums[g, i] = np.float32(0.0)
        lowest = max(kv_len - window, 0)
        for index in range(lowest // block_size, (kv_len + block_size - 1) // block_size):
            block = np.int64(tables[seq * table_stride + index])
            keys = block * block_stride + head * head_stride
            values = keys + kv_heads * head_stride
            first = max(lowest - index * block_size, 0)
            last = min(kv_len - index * block_size, block_size)
            for t in range(first, last):
                key = keys + t * head_dim
                for g in range(group):
                    score = np.float32(0.0)
                    for i in range(head_dim):
                        score += load(cache, key + i) * queries[g, i]
                    scores[g, t] = score
            for g in range(group):
                top = tops[g]
                for t in range(first, last):
                    top = max(top, scores[g, t])
                shrink = exp(tops[g] - top)
                tops[g] = top
                total = np.float32(0.0)
                for t in range(first, last):
                    weight = exp(scores[g, t] - top)
                    scores[g, t] = weight
                    total += weight
                totals[g] = totals[g] * shrink + total
                for i in range(head_dim):
                    sums[g, i] *= shrink
            for t in range(first, last):
                value = values + t * head_dim
                for g in range(group):
                    weight = scores[g, t]
                    for i in range(head_dim):
                        sums[g, i] += weight * load(cache, value + i)
        for g in range(group):
            target = row * out_stride + (head * group + g) * head_dim
            for i in range(head_dim):
                store(out, target + i, sums[g, i] / totals[g])


@kernel
def attend_bf16(args: Any) -> None:
    attend_rows(as_bf16, args)


@kernel
def attend_f32(args: Any) -> None:
    attend_rows(as_f32, args)


ATTEND = Kernel(attend_bf16, attend_f32)


def paged_attention(q: Tensor, batch: Batch, layer: int, scale: float, window: int | None = None) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype)
    if len(batch.single):
        attend_single(q, batch, layer, scale, window, out)
    for chunk in batch.chunks:
        rows = slice(chunk.first_row, chunk.first_row + chunk.count)
        k, v = attention_plain.gather_kv(batch, chunk.seq, layer, chunk.kv_len)
        out[rows] = attention_plain.attend(q[rows].transpose(0, 1), k, v, scale, window).transpose(0, 1)
    return out


def attend_single(q: Tensor, batch: Batch, layer: int, scale: float, window: int | None, out: Tensor) -> None:
    """Fill the rows of `out` that belong to sequences with one token."""
    cache = batch.kv_cache
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    sequences = len(batch.single)
    ATTEND.launch(
        q.dtype, sequences * kv_heads, q, cache[0, layer], out, torch.tensor((scale,)),
        batch.single, batch.query_start, batch.kv_len, batch.block_table,
        sequences, batch.block_table.stride(0), q.stride(0), out.stride(0),
        kv_heads, q.shape[1] // kv_heads, block_size, head_dim, cache.stride(0),
        window or NO_WINDOW,
    )  # fmt: skip
