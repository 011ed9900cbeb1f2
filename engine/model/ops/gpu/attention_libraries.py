"""Paged attention by the fastest library that works here, with the op's signature (ops/attention.py).

FlashInfer, arXiv:2501.01005, computes steps that only decode; FlashAttention 4 or 3, arXiv:2407.08608, computes any
step. Our Triton kernels (attention.py) compute the rest: all steps if there is no library, and in any case caches in
float8, float32, softcaps, sinks, chunks, and images whose tokens see each other.

A library is used only after a trial with the model's shapes, as the engine starts: it must agree with the oracle, be
captured in a CUDA graph, and be right for other lengths on replay. For steps that only decode, our kernel and the
libraries that pass are then timed, and the candidate with the best worst case is used. FlashInfer's kernels on Hopper
split all sequences of a batch into the same number of parts, whatever their length; our kernel splits by length. None
of this has run on a GPU yet. FlashAttention 2 is not used, because its blocks are multiples of 256 tokens. torch's
varlen attention is not used either, because its split path leaves out rows (pytorch #194167).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import cycle, islice
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
MAX_ERROR = 0.02  # root mean square, relative to the oracle's; bfloat16 gives 0.005
EDGE = 16.0  # factor on V at the border of a window, so that being off by one is a large error
WORKSPACE_BYTES = 256 << 20  # FlashInfer's partial results, after counters that must be 0 and that FlashInfer resets
COUNTER_BYTES = 4 << 20  # for trtllm-gen, 4 per query head and sequence; without them, each launch fills new ones
TIMED = ((8192,), (1024,) * 64, (32768,) + (1024,) * 63)  # lengths of sequences in the batches that are timed
TIMED_CACHE_BYTES = 128 << 20  # exceeds any GPU's cache; the sequences of a batch that needs more share blocks
TIMED_RUNS = 10

Attend = Callable[[Tensor, Batch, int, float, int | None], Tensor]  # q, batch, layer, scale, window
Candidates = list[tuple[str, Attend | None]]  # by name; None is our own kernel


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
    """Whether it supports sequences with several rows."""


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
    """Return and log the library for steps that only decode, and the library for all other steps. None means our own
    kernels."""
    right: Candidates = []
    for library in LIBRARIES:
        if (attend := load(library, device)) is None:
            continue
        try:
            check(attend, shape, device, chunks=library.chunks)
        except Exception as e:  # noqa: BLE001 - any error of a library
            logger.info("attention: %s is not used for %s: %s", library.name, shape, e)
            continue
        right.append((library.name, attend))
    chunks = {library.name for library in LIBRARIES if library.chunks}
    ours = ("Triton", None)
    decode = fastest([*right, ours], shape, device) if right else ours
    others = next((candidate for candidate in right if candidate[0] in chunks), ours)
    logger.info("attention: decode steps by %s, others by %s", decode[0], others[0])
    return decode[1], others[1]


def fastest(candidates: Candidates, shape: Shape, device: torch.device) -> tuple[str, Attend | None]:
    """Compare each candidate's time with the fastest candidate's on each batch of TIMED. Return the candidate whose
    largest ratio is smallest. Logs all ratios."""
    times = [seconds(attend or attention.paged_attention, shape, device) for _, attend in candidates]
    best = [min(column) for column in zip(*times, strict=True)]
    ratios = [[own / least for own, least in zip(row, best, strict=True)] for row in times]
    for (name, _), row in zip(candidates, ratios, strict=True):
        logger.info("attention: %s takes %s times the best", name, ", ".join(f"{ratio:.2f}" for ratio in row))
    return candidates[min(range(len(candidates)), key=lambda i: max(ratios[i]))]


def seconds(attend: Attend, shape: Shape, device: torch.device) -> list[float]:
    """Return the seconds of one layer's attention for each batch of TIMED, replayed from a graph as in decode."""
    found = []
    for lengths in TIMED:
        q, batch = small_batch([1] * len(lengths), lengths, shape, device, most_bytes=TIMED_CACHE_BYTES)
        gpu = CudaDevice()
        run = partial(step, attend, q, batch, shape.window)
        run()
        _, replay, destroy = gpu.capture(run)
        replay()
        _, elapsed = gpu.timed(partial(repeat, replay, q))
        gpu.event().wait()
        found.append(elapsed() / TIMED_RUNS)
        destroy()
    return found


@cache
def load(library: Library, device: torch.device) -> Attend | None:
    try:
        if torch.cuda.get_device_capability(device) not in library.capabilities:
            raise ValueError("it does not support this GPU")
        return library.load(device)
    except Exception as e:  # noqa: BLE001 - any error of a library
        logger.info("attention: %s is not used: %s", library.name, e)
        return None


def flash_infer(device: torch.device) -> Attend:
    """Load FlashInfer: `xqa` kernels on Hopper and RTX cards, `trtllm-gen` on Blackwell. Written for 0.7.2.post1."""
    function = importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    counters = torch.zeros(COUNTER_BYTES, dtype=torch.uint8, device=device)  # each launch leaves them at zero

    def attend(q: Tensor, batch: Batch, layer: int, scale: float, window: int | None) -> Tensor:
        counted = counters if 4 * q.shape[0] * q.shape[1] <= COUNTER_BYTES else None
        # it is not documented to support length 0, so padding reads one token of some block; its rows are not used
        kv_len = batch.plans.get("at least 1")
        if kv_len is None:
            kv_len = batch.plans["at least 1"] = batch.kv_len.clamp(min=1)
        longest = batch.block_table.shape[1] * batch.kv_cache.shape[4]
        out: Tensor = function(
            q.contiguous(), batch.kv_cache[:, layer].unbind(1), workspace, batch.block_table.contiguous(), kv_len,
            longest, bmm1_scale=scale, bmm2_scale=1.0, window_left=-1 if window is None else window - 1,
            kv_layout="HND", multi_ctas_kv_counter_buffer=counted,
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
    """Load FlashAttention 4. Written for 4.0.0b36."""
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


LIBRARIES = (  # the first that supports chunks and works here computes prompts
    Library("FlashInfer", ((9, 0), (10, 0), (10, 3), (12, 0), (12, 1)), flash_infer, chunks=False),
    Library("FlashAttention 4", ((10, 0), (10, 3)), flash_attention_4, chunks=True),
    Library("FlashAttention 3", ((9, 0),), flash_attention_3, chunks=True),
)


def tokens_outside_heads(batch: Batch, layer: int) -> tuple[Tensor, ...]:
    """Return views of K and V, [blocks, block_size, kv_heads, head_dim], as libraries read them."""
    return batch.kv_cache[:, layer].transpose(2, 3).unbind(1)


def longest_chunk(batch: Batch) -> int:
    return max((chunk.count for chunk in batch.chunks), default=1)


def repeat(replay: Callable[[], None], output: Tensor) -> Tensor:
    for _ in range(TIMED_RUNS):
        replay()
    return output


def check(attend: Attend, shape: Shape, device: torch.device, *, chunks: bool) -> None:
    """Raise ValueError unless the library agrees with the oracle, also in a graph replayed with other lengths."""
    for counts, lengths, others in trials(shape.window, chunks):
        q, batch = small_batch(counts, lengths, shape, device)
        compare(step(attend, q, batch, shape.window), q, batch, shape.window)
        out, replay = capture(partial(step, attend, q, batch, shape.window))
        batch.kv_len.copy_(torch.tensor(others, device=device))
        batch.block_table.copy_(batch.block_table.flip(0))
        replay()
        compare(out, q, batch, shape.window)


def trials(window: int | None, chunks: bool) -> list[tuple[list[int], tuple[int, ...], tuple[int, ...]]]:
    """Return trials: new tokens of each sequence, lengths, and lengths on replay of the graph. If there is a window,
    some sequences are longer than it, and some end at its border."""
    long = 300 if window is None else window + 37
    found = [
        ([1], (long,), (long - 10,)),
        ([1] * 3, (long, 0, 7), (9, long - 10, 0)),
        ([1] * 33, tuple(islice(cycle((300, 0, 7, 64)), 33)), tuple(islice(cycle((5, 290, 0)), 33))),
    ]
    if window is not None:
        found.append(([1] * 3, (window + 1, window, max(window - 1, 1)), (window, window + 1, window)))
    if chunks:
        found.append(([1, 5, 1], (long, long - 35, 7), (9, long - 20, 64)))
    return found


def step(attend: Attend, q: Tensor, batch: Batch, window: int | None) -> Tensor:
    return attend(q, replace(batch, plans={}), 1, 0.1, window)


def capture(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    output, replay, _ = CudaDevice().capture(run)
    return output, replay


def compare(found: Tensor, q: Tensor, batch: Batch, window: int | None) -> None:
    """Raise ValueError unless each row is close to the oracle's. Padding is not compared."""
    expected = attention_plain.paged_attention(q, batch, 1, 0.1, window).float().flatten(1)
    real = (batch.kv_len > 0).repeat_interleave(batch.query_start.diff())
    errors = (found.float().flatten(1) - expected).norm(dim=1) / expected.norm(dim=1)
    error = errors[real].max().item()
    if not error < MAX_ERROR:
        raise ValueError(f"in a trial, a row of its results differed by {error:.1%}")


def small_batch(
    counts: list[int], kv_lens: tuple[int, ...], shape: Shape, device: torch.device, most_bytes: int = 1 << 40
) -> tuple[Tensor, Batch]:
    """Return random q [sum(counts), heads, head_dim] of `shape.dtype`, and a step with a random cache of two layers.

    most_bytes: limit on the cache, above which sequences share blocks.
    """
    width = -(-max(kv_lens) // shape.block_size)
    block_bytes = 4 * shape.kv_heads * shape.block_size * shape.head_dim * shape.dtype.itemsize
    num_blocks = min(len(counts) * width, max(most_bytes // block_bytes, 1))
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(num_blocks, generator=generator, device="cpu").int()
    table = order.repeat(-(-len(counts) * width // num_blocks))[: len(counts) * width].view(len(counts), width)
    cache_shape = num_blocks, 2, 2, shape.kv_heads, shape.block_size, shape.head_dim
    cache = torch.randn(cache_shape, generator=generator, device="cpu")
    if shape.window is not None:
        for blocks, length in zip(table, kv_lens, strict=True):
            for position in range(max(length - shape.window - 1, 0), max(length - shape.window + 1, 0)):
                cache[blocks[position // shape.block_size], :, 1, :, position % shape.block_size] *= EDGE
    single, chunks = split(counts, list(kv_lens))
    batch = Batch(
        positions=torch.empty(0, device=device),  # used only where KV is written
        slot_mapping=torch.empty(0, device=device),
        query_start=torch.tensor([0, *counts], device=device).cumsum(0).int(),
        kv_len=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        kv_cache=cache.to(device, shape.dtype),
        single=single.to(device),
        chunks=chunks,
    )
    q = torch.randn((sum(counts), shape.heads, shape.head_dim), generator=generator, device="cpu")
    return q.to(device, shape.dtype), batch
