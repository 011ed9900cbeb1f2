"""Paged attention by the flash-attn packages, behind the op's signature.

The cache has KV heads outside tokens; both packages take a strided view of it with tokens outside heads. What they do
not take (a cache in float8, float32, other block sizes) our Triton kernel computes.

  FlashAttention-3, arXiv:2407.08608   module flash_attn_interface, Hopper only, any block size
  FlashAttention-2, arXiv:2307.08691   package flash-attn, only where `block_size` is set to a multiple of 256 tokens

A library is used only after it has computed a small batch right (`works`), since none of this has run on a GPU yet and
their signatures change between versions. torch's own varlen attention is not among them: its split path leaves out
rows (pytorch #194167).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
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
AMPERE = (8, 0)
DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
TRIAL_ERROR = 0.05  # bfloat16 gives 0.01
FAILURES = (ImportError, OSError, RuntimeError, TypeError, ValueError, AttributeError, AssertionError)


@dataclass(frozen=True)
class Backend:
    """attend(q, k, v, batch, scale, window) -> like q, with k and v [blocks, block_size, kv_heads, head_dim] of one
    layer and the window as (tokens to the left, tokens to the right) with -1 for all.

    page: block sizes must be a multiple of it.
    """

    name: str
    page: int
    attend: Callable[[Tensor, Tensor, Tensor, Batch, float, tuple[int, int]], Tensor]


def paged_attention(q: Tensor, batch: Batch, layer: int, scale: float, window: int | None = None) -> Tensor:
    backend = select(q.device)
    if backend is None or not fits(backend, q.dtype, batch.kv_cache):
        return attention.paged_attention(q, batch, layer, scale, window)
    k, v = batch.kv_cache[:, layer].transpose(2, 3).unbind(1)
    return backend.attend(q, k, v, batch, scale, (-1 if window is None else window - 1, 0))


def fits(backend: Backend, dtype: torch.dtype, kv_cache: Tensor) -> bool:
    page, head_dim = kv_cache.shape[4:]
    shape_fits = page % backend.page == 0 and head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM
    return shape_fits and kv_cache.dtype == dtype and dtype in DTYPES


@cache
def select(device: torch.device) -> Backend | None:
    """The first library that is installed, made for this card and right; None for our own kernel. Logs why, once."""
    capability = torch.cuda.get_device_capability(device)
    reasons = []
    for name, needed, load in LIBRARIES:
        if capability < needed:
            reasons.append(f"{name} needs compute capability {needed[0]}.{needed[1]}")
            continue
        try:
            backend = load()
            works(backend, device)
        except FAILURES as e:
            reasons.append(f"{name}: {e}")
            continue
        logger.info("attention backend: %s where block_size is a multiple of %d, else Triton", name, backend.page)
        return backend
    logger.info("attention backend: Triton (%s)", "; ".join(reasons))
    return None


def works(backend: Backend, device: torch.device) -> None:
    """Raise ValueError unless the backend computes small batches as the oracle does, with chunks and with padding."""
    for counts, kv_lens in (([1, 5, 1], [259, 265, 7]), ([1, 1, 1], [259, 0, 7])):
        q, batch = trial_batch(max(backend.page, 16), counts, kv_lens, device)
        k, v = batch.kv_cache[:, 1].transpose(2, 3).unbind(1)
        for window in (None, 4):
            expected = attention_plain.paged_attention(q, batch, 1, 0.1, window)
            found = backend.attend(q, k, v, batch, 0.1, (-1 if window is None else window - 1, 0))
            error = (found - expected).abs().max().item()
            if not error < TRIAL_ERROR:
                raise ValueError(f"its results are off by {error:.3g} in a trial")


def trial_batch(page: int, counts: list[int], kv_lens: list[int], device: torch.device) -> tuple[Tensor, Batch]:
    kv_heads, group, head_dim, width = 2, 2, 64, -(-max(kv_lens) // page)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randperm(len(counts) * width, generator=generator, device="cpu").int()
    shape = (len(blocks), 2, 2, kv_heads, page, head_dim)
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


def longest_query(batch: Batch) -> int:
    return max((chunk.count for chunk in batch.chunks), default=1)


def longest_key(batch: Batch) -> int:
    return batch.block_table.shape[1] * batch.kv_cache.shape[4]


def key_start(batch: Batch) -> Tensor:
    """[seqs + 1] int32, as if the keys of the sequences were laid end to end; computed once for all layers."""
    if batch.tiles is None:
        batch.tiles = torch.nn.functional.pad(batch.kv_len.cumsum(0, dtype=torch.int32), (1, 0))
    return batch.tiles


def load_flash_attn_3() -> Backend:
    attend_pages = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache

    def attend(q: Tensor, k: Tensor, v: Tensor, batch: Batch, scale: float, window: tuple[int, int]) -> Tensor:
        return attend_pages(
            q, k, v, cache_seqlens=batch.kv_len, page_table=batch.block_table, cu_seqlens_q=batch.query_start,
            max_seqlen_q=longest_query(batch), softmax_scale=scale, causal=True, window_size=window,
        )  # fmt: skip

    return Backend("FlashAttention-3", 1, attend)


def load_flash_attn_2() -> Backend:
    flash_attn = importlib.import_module("flash_attn")
    attend_rows, attend_chunks = flash_attn.flash_attn_with_kvcache, flash_attn.flash_attn_varlen_func

    def attend(q: Tensor, k: Tensor, v: Tensor, batch: Batch, scale: float, window: tuple[int, int]) -> Tensor:
        options = {"softmax_scale": scale, "causal": True, "window_size": window, "block_table": batch.block_table}
        if not batch.chunks:  # only this function splits the keys over programs
            return attend_rows(q[:, None], k, v, cache_seqlens=batch.kv_len, **options).squeeze(1)
        return attend_chunks(
            q, k, v, cu_seqlens_q=batch.query_start, cu_seqlens_k=key_start(batch),
            max_seqlen_q=longest_query(batch), max_seqlen_k=longest_key(batch), **options,
        )  # fmt: skip

    return Backend("FlashAttention-2", 256, attend)


# the fastest first: name, least compute capability, loader
LIBRARIES: tuple[tuple[str, tuple[int, int], Callable[[], Backend]], ...] = (
    ("FlashAttention-3", HOPPER, load_flash_attn_3),
    ("FlashAttention-2", AMPERE, load_flash_attn_2),
)
