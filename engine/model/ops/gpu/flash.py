"""Paged attention by FlashAttention 3, arXiv:2407.08608 (module flash_attn_interface, Hopper only), behind the op's
signature. What it does not take (a cache in float8, float32, wide heads, a softcap, sinks, chunks) our Triton kernel
computes.

The cache has KV heads outside tokens; the library takes a strided view of it with tokens outside heads. It is used only
after it has computed small batches right (`check`), since none of this has run on a GPU yet and its signature changes
between versions. FlashAttention 2 is not used: its blocks are multiples of 256 tokens. Nor is torch's varlen attention:
its split path leaves out rows (pytorch #194167).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from engine.model.batch import Batch, split
from engine.model.ops import attention_plain
from engine.model.ops.gpu import attention
from engine.model.ops.gpu.rope import rotate_and_write

__all__ = ["paged_attention", "rotate_and_write"]

logger = logging.getLogger(__name__)

HOPPER = (9, 0)
DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MAX_ERROR = 0.05  # bfloat16 gives 0.01
FAILURES = (ImportError, OSError, RuntimeError, TypeError, ValueError, AttributeError, AssertionError)

FlashAttention = Callable[..., Tensor]  # flash_attn_with_kvcache


def paged_attention(
    q: Tensor, batch: Batch, layer: int, scale: float, window: int | None = None,
    *, softcap: float | None = None, sinks: Tensor | None = None, chunk: int | None = None,
) -> Tensor:  # fmt: skip
    flash_attention, head_dim = select(q.device), q.shape[2]
    plain_scores = softcap is None and sinks is None and chunk is None
    fits = batch.kv_cache.dtype == q.dtype and q.dtype in DTYPES and head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM
    if flash_attention is None or not fits or not plain_scores:
        return attention.paged_attention(q, batch, layer, scale, window, softcap=softcap, sinks=sinks, chunk=chunk)
    return attend(flash_attention, q, batch, layer, scale, window)


def attend(
    flash_attention: FlashAttention, q: Tensor, batch: Batch, layer: int, scale: float, window: int | None
) -> Tensor:
    k, v = batch.kv_cache[:, layer].transpose(2, 3).unbind(1)  # [blocks, block_size, kv_heads, head_dim]
    return flash_attention(
        q, k, v, cache_seqlens=batch.kv_len, page_table=batch.block_table, cu_seqlens_q=batch.query_start,
        max_seqlen_q=max((chunk.count for chunk in batch.chunks), default=1), softmax_scale=scale, causal=True,
        window_size=(-1 if window is None else window - 1, 0),  # tokens to the left and to the right; -1 is all
    )  # fmt: skip


@cache
def select(device: torch.device) -> FlashAttention | None:
    """The library, if it is installed, made for this card and right; None for our own kernel. Logs why, once."""
    try:
        if torch.cuda.get_device_capability(device) < HOPPER:
            raise ValueError(f"it needs compute capability {HOPPER[0]}.{HOPPER[1]}")
        flash_attention: FlashAttention = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
        check(flash_attention, device)
    except FAILURES as e:
        logger.info("attention backend: Triton (FlashAttention-3: %s)", e)
        return None
    logger.info("attention backend: FlashAttention-3")
    return flash_attention


def check(flash_attention: FlashAttention, device: torch.device) -> None:
    """Raise ValueError unless the library computes small batches as the oracle does, with chunks and with padding."""
    for counts, kv_lens in (([1, 5, 1], [259, 265, 7]), ([1, 1, 1], [259, 0, 7])):
        q, batch = small_batch(counts, kv_lens, device)
        for window in (None, 4):
            expected = attention_plain.paged_attention(q, batch, 1, 0.1, window)
            error = (attend(flash_attention, q, batch, 1, 0.1, window) - expected).abs().max().item()
            if not error < MAX_ERROR:
                raise ValueError(f"its results are off by {error:.3g} in a trial")


def small_batch(counts: list[int], kv_lens: list[int], device: torch.device) -> tuple[Tensor, Batch]:
    kv_heads, group, head_dim, block_size = 2, 2, 64, 64
    width = -(-max(kv_lens) // block_size)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randperm(len(counts) * width, generator=generator, device="cpu").int()
    shape = (len(blocks), 2, 2, kv_heads, block_size, head_dim)
    single, chunks = split(counts, kv_lens)
    batch = Batch(
        positions=torch.empty(0, device=device),  # only for writing
        slot_mapping=torch.empty(0, device=device),
        query_start=torch.tensor([0, *counts], device=device).cumsum(0).int(),
        kv_len=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        block_table=blocks.view(len(counts), width).to(device),
        kv_cache=torch.randn(shape, generator=generator, device="cpu").to(device, torch.bfloat16),
        single=single.to(device),
        chunks=chunks,
    )
    q = torch.randn((sum(counts), kv_heads * group, head_dim), generator=generator, device="cpu")
    return q.to(device, torch.bfloat16), batch
