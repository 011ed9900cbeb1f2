"""FlashAttention for any step: 2 for Ampere and Ada, arXiv:2307.08691, 3 for Hopper, arXiv:2407.08608, and 4 for Hopper
and Blackwell. Written for flash-attn 2.8.3, for commit 01afd16 of flash-attention's folder `hopper`, and for
flash-attn-4 4.0.0b36."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops.gpu.libraries.choice import Attend, longest


def version_2(device: torch.device) -> Attend:
    function = importlib.import_module("flash_attn").flash_attn_varlen_func

    def attend(q: Tensor, batch: Batch, layer: int, scale: float, window: int | None) -> Tensor:
        k, v = tokens_outside_heads(batch, layer)
        out: Tensor = function(
            q, k, v, batch.query_start, key_start(batch), longest_chunk(batch), longest(batch),
            softmax_scale=scale, causal=True, block_table=batch.block_table,
            window_size=(-1 if window is None else window - 1, -1 if window is None else 0),
        )  # fmt: skip
        return out

    return attend


def version_3(device: torch.device) -> Attend:
    function = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache

    def attend(q: Tensor, batch: Batch, layer: int, scale: float, window: int | None) -> Tensor:
        k, v = tokens_outside_heads(batch, layer)
        out: Tensor = function(
            q, k, v, cache_seqlens=batch.kv_len, page_table=batch.block_table, cu_seqlens_q=batch.query_start,
            max_seqlen_q=longest_chunk(batch), softmax_scale=scale, causal=True,
            window_size=(-1 if window is None else window - 1, 0),  # tokens to the left and to the right; -1 is all
        )  # fmt: skip
        return out

    return attend


def version_4(device: torch.device) -> Attend:
    function = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    splits = 1 if torch.cuda.get_device_capability(device)[0] == 9 else 0  # on Hopper it cannot split keys; 0 is auto

    def attend(q: Tensor, batch: Batch, layer: int, scale: float, window: int | None) -> Tensor:
        k, v = tokens_outside_heads(batch, layer)
        out: Tensor = function(
            q, k, v, cu_seqlens_q=batch.query_start, seqused_k=batch.kv_len, page_table=batch.block_table,
            max_seqlen_q=longest_chunk(batch), softmax_scale=scale, causal=True, num_splits=splits,
            window_size=(None if window is None else window - 1, None if window is None else 0),
        )[0]  # fmt: skip
        return out

    return attend


def tokens_outside_heads(batch: Batch, layer: int) -> tuple[Tensor, ...]:
    """Return views of K and V, [blocks, block_size, kv_heads, head_dim], as libraries read them."""
    return batch.kv_cache[:, layer].transpose(2, 3).unbind(1)


def longest_chunk(batch: Batch) -> int:
    return max((chunk.count for chunk in batch.chunks), default=1)


def key_start(batch: Batch) -> Tensor:
    """Return the sums of the lengths of all sequences before each one, [seqs + 1] int32; the first layer computes them
    for all layers."""
    if "key start" not in batch.plans:
        sums = batch.kv_len.cumsum(0, dtype=torch.int32)
        batch.plans["key start"] = torch.nn.functional.pad(sums, (1, 0))
    found: Tensor = batch.plans["key start"]
    return found
