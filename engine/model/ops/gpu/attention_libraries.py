"""Paged attention by the fastest library that works here, behind the op's signature (ops/attention.py).

FlashInfer, arXiv:2501.01005, for steps that only decode, and FlashAttention 4 or 3, arXiv:2407.08608, for any step. Our
Triton kernels (attention.py) compute where there is none, and what libraries are not asked for: a cache in float8,
float32, a softcap, sinks, chunks, images whose tokens see each other.

A library is used only after a trial of the model's own shapes, as the engine starts: it has to compute small batches as
the oracle does, be captured in a CUDA graph, and follow other lengths when it is replayed. Nothing of this has run on a
GPU yet. FlashAttention 2 is not used: its blocks are multiples of 256 tokens. Nor is torch's varlen attention, whose
split path leaves out rows (pytorch #194167).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.device import CudaDevice
from engine.model.batch import Batch, split
from engine.model.ops import attention_plain
from engine.model.ops.gpu import attention
from engine.model.ops.gpu.rope import rotate_and_write

__all__ = ["paged_attention", "rotate_and_write"]

logger = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16)
MAX_ERROR = 0.05  # bfloat16 gives 0.01
WORKSPACE_BYTES = 256 << 20  # FlashInfer's partial results; it counts in zeros at the front and leaves zeros there

Attend = Callable[[Tensor, Batch, int, float, int | None], Tensor]  # q, batch, layer, scale, window


class Shape(NamedTuple):
    dtype: torch.dtype
    heads: int
    kv_heads: int
    block_size: int
    head_dim: int
    window: int | None


class Library(NamedTuple):
    name: str
    capabilities: tuple[tuple[int, int], ...]
    load: Callable[[torch.device], Attend]
    chunks: bool
    """True if it takes sequences with several rows."""


def paged_attention(
    q: Tensor, batch: Batch, layer: int, scale: float, window: int | None = None,
    *, softcap: float | None = None, sinks: Tensor | None = None, chunk: int | None = None,
) -> Tensor:  # fmt: skip
    plain_scores = softcap is None and sinks is None and chunk is None and batch.image_ends is None
    if plain_scores and batch.kv_cache.dtype == q.dtype and q.dtype in DTYPES:
        _, _, _, kv_heads, block_size, head_dim = batch.kv_cache.shape
        shape = Shape(q.dtype, q.shape[1], kv_heads, block_size, head_dim, window)
        attend = select(q.device, shape)[len(batch.chunks) > 0]
        if attend is not None:
            return attend(q, batch, layer, scale, window)
    return attention.paged_attention(q, batch, layer, scale, window, softcap=softcap, sinks=sinks, chunk=chunk)


@cache
def select(device: torch.device, shape: Shape) -> tuple[Attend | None, Attend | None]:
    """Return the library for steps that only decode and the one for all others; None for our own kernels. Logs both."""
    chosen: list[tuple[str, Attend | None]] = [("Triton", None)] * 2
    for library in reversed(LIBRARIES):
        if (attend := load(library, device)) is None:
            continue
        try:
            check(attend, shape, device, chunks=library.chunks)
        except Exception as e:  # noqa: BLE001 - whatever a library raises
            logger.info("attention: %s is left out for %s: %s", library.name, shape, e)
            continue
        for kind in range(1 + library.chunks):
            chosen[kind] = library.name, attend
    logger.info("attention: decode steps by %s, others by %s", *(name for name, _ in chosen))
    return chosen[0][1], chosen[1][1]


@cache
def load(library: Library, device: torch.device) -> Attend | None:
    try:
        if torch.cuda.get_device_capability(device) not in library.capabilities:
            raise ValueError("it is not made for this GPU")
        return library.load(device)
    except Exception as e:  # noqa: BLE001 - whatever a library raises
        logger.info("attention: %s is left out: %s", library.name, e)
        return None


def flash_infer(device: torch.device) -> Attend:
    """Its `xqa` kernels on Hopper and RTX cards, NVIDIA's own (`trtllm-gen`) on Blackwell; read in 0.7.2.post1."""
    function = importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def attend(q: Tensor, batch: Batch, layer: int, scale: float, window: int | None) -> Tensor:
        # it is not said to take a length of 0, so padding reads a token of some block; nobody reads its rows
        kv_len = batch.plans.get("at least 1")
        if kv_len is None:
            kv_len = batch.plans["at least 1"] = batch.kv_len.clamp(min=1)
        longest = batch.block_table.shape[1] * batch.kv_cache.shape[4]
        out: Tensor = function(
            q.contiguous(), batch.kv_cache[:, layer].unbind(1), workspace, batch.block_table.contiguous(), kv_len,
            longest, bmm1_scale=scale, bmm2_scale=1.0, window_left=-1 if window is None else window - 1,
            kv_layout="HND",
        )  # fmt: skip
        return out

    return attend


def flash_attention_3(device: torch.device) -> Attend:
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


def flash_attention_4(device: torch.device) -> Attend:
    """Read in 4.0.0b36."""
    function = importlib.import_module("flash_attn.cute").flash_attn_varlen_func

    def attend(q: Tensor, batch: Batch, layer: int, scale: float, window: int | None) -> Tensor:
        k, v = tokens_outside_heads(batch, layer)
        out: Tensor = function(
            q, k, v, cu_seqlens_q=batch.query_start, seqused_k=batch.kv_len, page_table=batch.block_table,
            max_seqlen_q=longest_chunk(batch), softmax_scale=scale, causal=True, num_splits=0,
            window_size=(None if window is None else window - 1, None if window is None else 0),
        )[0]  # fmt: skip
        return out

    return attend


LIBRARIES = (  # the first that works is taken
    Library("FlashInfer", ((9, 0), (10, 0), (10, 3), (12, 0), (12, 1)), flash_infer, chunks=False),
    Library("FlashAttention 4", ((10, 0), (10, 3)), flash_attention_4, chunks=True),
    Library("FlashAttention 3", ((9, 0),), flash_attention_3, chunks=True),
)


def tokens_outside_heads(batch: Batch, layer: int) -> tuple[Tensor, ...]:
    """Views of K and V, [blocks, block_size, kv_heads, head_dim], where the cache has heads outside tokens."""
    return batch.kv_cache[:, layer].transpose(2, 3).unbind(1)


def longest_chunk(batch: Batch) -> int:
    return max((chunk.count for chunk in batch.chunks), default=1)


def check(attend: Attend, shape: Shape, device: torch.device, *, chunks: bool) -> None:
    """Raise ValueError unless the library follows the oracle, also in a graph that is replayed with other lengths."""
    trials = [([1, 1, 1], (300, 0, 7), (9, 290, 0))]
    if chunks:
        trials.append(([1, 5, 1], (300, 265, 7), (9, 280, 64)))
    for counts, lengths, others in trials:
        q, batch = small_batch(counts, lengths, shape, device)
        compare(step(attend, q, batch, shape.window), q, batch, shape.window)
        out, replay = capture(partial(step, attend, q, batch, shape.window))
        batch.kv_len.copy_(torch.tensor(others, device=device))
        batch.block_table.copy_(batch.block_table.flip(0))
        replay()
        compare(out, q, batch, shape.window)


def step(attend: Attend, q: Tensor, batch: Batch, window: int | None) -> Tensor:
    return attend(q, replace(batch, plans={}), 1, 0.1, window)


def capture(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    output, replay, _ = CudaDevice().capture(run)
    return output, replay


def compare(found: Tensor, q: Tensor, batch: Batch, window: int | None) -> None:
    expected = attention_plain.paged_attention(q, batch, 1, 0.1, window)
    real = (batch.kv_len > 0).repeat_interleave(batch.query_start.diff())
    error = (found - expected)[real].abs().max().item()
    if not error < MAX_ERROR:
        raise ValueError(f"its results are off by {error:.3g} in a trial")


def small_batch(
    counts: list[int], kv_lens: tuple[int, ...], shape: Shape, device: torch.device
) -> tuple[Tensor, Batch]:
    """Return q, [sum(counts), heads, head_dim] of `shape.dtype`, and a step whose cache has two layers, both random."""
    width = -(-max(kv_lens) // shape.block_size)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randperm(len(counts) * width, generator=generator, device="cpu").int()
    cache_shape = len(blocks), 2, 2, shape.kv_heads, shape.block_size, shape.head_dim
    single, chunks = split(counts, list(kv_lens))
    batch = Batch(
        positions=torch.empty(0, device=device),  # only for writing
        slot_mapping=torch.empty(0, device=device),
        query_start=torch.tensor([0, *counts], device=device).cumsum(0).int(),
        kv_len=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        block_table=blocks.view(len(counts), width).to(device),
        kv_cache=torch.randn(cache_shape, generator=generator, device="cpu").to(device, shape.dtype),
        single=single.to(device),
        chunks=chunks,
    )
    q = torch.randn((sum(counts), shape.heads, shape.head_dim), generator=generator, device="cpu")
    return q.to(device, shape.dtype), batch
