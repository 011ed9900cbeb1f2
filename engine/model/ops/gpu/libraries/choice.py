"""Chooses what computes attention over the paged cache: our Triton kernel, or a library that is installed.

A library is used only after a trial with the model's shapes, as the engine starts: it must agree with the oracle, be
captured in a CUDA graph, and be right for other lengths on replay. For steps that only decode, our kernel and the
libraries that pass are then timed, and the candidate with the best worst case is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.devices.cuda_device import CudaDevice
from engine.model.batch import Batch, split

logger = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16)
MAX_ERROR = 0.02  # root mean square, relative to the oracle's; bfloat16 gives 0.005
EDGE = 16.0  # factor on V at the border of a window, so that being off by one is a large error
TIMED = ((8192,), (1024,) * 64, (32768,) + (1024,) * 63)  # lengths of sequences in the batches that are timed
TIMED_CACHE_BYTES = 1 << 30  # so that blocks that sequences share are not read from a GPU's cache
TIMED_RUNS = 10
LAYERS = 2  # of a trial; they share `Batch.plans` as the layers of a model do

Attend = Callable[[Tensor, Batch, int, float, Any], Tensor]  # q, batch, layer, scale, window
Candidates = list[tuple[str, Attend | None]]  # by name; None is our own kernel


class AttentionShape(NamedTuple):
    dtype: torch.dtype
    heads: int
    kv_heads: int
    block_size: int
    head_dim: int
    window: int | None = None


class Library(NamedTuple):
    name: str
    capabilities: tuple[tuple[int, int], ...]
    load: Callable[[torch.device], Attend]
    chunks: bool
    """Whether it supports sequences with several rows."""


class Op(NamedTuple):
    """An op for which there are libraries."""

    name: str
    libraries: tuple[Library, ...]
    ours: Attend
    """Our Triton kernel."""
    plain: Attend
    """The oracle."""


@cache
def select(op: Op, device: torch.device, shape: AttentionShape) -> tuple[Attend | None, Attend | None]:
    """Return and log the library for steps that only decode, and the library for all other steps. None means our own
    kernels."""
    right: Candidates = []
    for library in op.libraries:
        if (attend := load(op, library, device)) is None:
            continue
        try:
            check(op, attend, shape, device, chunks=library.chunks)
        except Exception as e:  # noqa: BLE001 - any error of a library
            logger.info("%s: %s is not used for %s: %s", op.name, library.name, shape, e)
            continue
        right.append((library.name, attend))
    chunks = {library.name for library in op.libraries if library.chunks}
    ours = ("Triton", None)
    decode = fastest(op, [*right, ours], shape, device) if right else ours
    others = next((candidate for candidate in right if candidate[0] in chunks), ours)
    logger.info("%s: decode steps by %s, others by %s", op.name, decode[0], others[0])
    return decode[1], others[1]


def fastest(op: Op, candidates: Candidates, shape: AttentionShape, device: torch.device) -> tuple[str, Attend | None]:
    """Compare each candidate's time with the fastest candidate's on each batch of TIMED. Return the candidate whose
    largest ratio is smallest. Logs all ratios."""
    times = [seconds(attend or op.ours, shape, device) for _, attend in candidates]
    best = [min(column) for column in zip(*times, strict=True)]
    ratios = [[own / least for own, least in zip(row, best, strict=True)] for row in times]
    for (name, _), row in zip(candidates, ratios, strict=True):
        logger.info("%s: %s takes %s times the best", op.name, name, ", ".join(f"{ratio:.2f}" for ratio in row))
    return candidates[min(range(len(candidates)), key=lambda i: max(ratios[i]))]


def seconds(attend: Attend, shape: AttentionShape, device: torch.device) -> list[float]:
    """Return the seconds of one layer's attention for each batch of TIMED, replayed from a graph as in decode."""
    found = []
    for lengths in TIMED:
        q, batch = small_batch([1] * len(lengths), lengths, shape, device, most_bytes=TIMED_CACHE_BYTES)
        gpu = CudaDevice()
        run = partial(step, attend, q, batch, shape)
        run()
        _, replay, destroy = gpu.capture(run)
        replay()
        _, elapsed = gpu.timed(partial(repeat, replay, q))
        gpu.event().wait()
        found.append(elapsed() / TIMED_RUNS / LAYERS)
        destroy()
    return found


@cache
def load(op: Op, library: Library, device: torch.device) -> Attend | None:
    try:
        if torch.cuda.get_device_capability(device) not in library.capabilities:
            raise ValueError("it does not support this GPU")
        return library.load(device)
    except Exception as e:  # noqa: BLE001 - any error of a library
        logger.info("%s: %s is not used: %s", op.name, library.name, e)
        return None


def repeat(replay: Callable[[], None], output: Tensor) -> Tensor:
    for _ in range(TIMED_RUNS):
        replay()
    return output


def check(op: Op, attend: Attend, shape: AttentionShape, device: torch.device, *, chunks: bool) -> None:
    """Raise ValueError unless the library agrees with the oracle, also in a graph replayed with other lengths."""
    for counts, lengths, others in trials(shape.window, chunks):
        q, batch = small_batch(counts, lengths, shape, device)
        compare(op, step(attend, q, batch, shape), q, batch, shape)
        out, replay = capture(partial(step, attend, q, batch, shape))
        batch.kv_len.copy_(torch.tensor(others, device=device))
        batch.block_table.copy_(batch.block_table.flip(0))
        replay()
        compare(op, out, q, batch, shape)


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


def step(attend: Attend, q: Tensor, batch: Batch, shape: AttentionShape) -> Tensor:
    """Attend in each layer. Returns the result of the last one."""
    batch = replace(batch, plans={})
    return [attend(q, batch, layer, 0.1, shape.window) for layer in range(LAYERS)][-1]


def capture(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    output, replay, _ = CudaDevice().capture(run)
    return output, replay


def compare(op: Op, found: Tensor, q: Tensor, batch: Batch, shape: AttentionShape) -> None:
    """Raise ValueError unless each row is close to the oracle's. Padding is not compared."""
    expected = op.plain(q, batch, LAYERS - 1, 0.1, shape.window).float().flatten(1)
    real = (batch.kv_len > 0).repeat_interleave(batch.query_start.diff())
    errors = (found.float().flatten(1) - expected).norm(dim=1) / expected.norm(dim=1)
    error = errors[real].max().item()
    if not error < MAX_ERROR:
        raise ValueError(f"in a trial, a row of its results differed by {error:.1%}")


def small_batch(
    counts: list[int], kv_lens: tuple[int, ...], shape: AttentionShape, device: torch.device, most_bytes: int = 1 << 40
) -> tuple[Tensor, Batch]:
    """Return random q [sum(counts), heads, head_dim] of `shape.dtype`, and a step with a random cache.

    most_bytes: limit on the cache, above which sequences share blocks.
    """
    width = -(-max(kv_lens) // shape.block_size)
    block_bytes = LAYERS * 2 * shape.kv_heads * shape.block_size * shape.head_dim * shape.dtype.itemsize
    num_blocks = min(len(counts) * width, max(most_bytes // block_bytes, 1))
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(num_blocks, generator=generator, device="cpu").int()
    table = order.repeat(-(-len(counts) * width // num_blocks))[: len(counts) * width].view(len(counts), width)
    cache_shape = num_blocks, LAYERS, 2, shape.kv_heads, shape.block_size, shape.head_dim
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


def longest(batch: Batch) -> int:
    """Return the most tokens that a sequence of this batch can have."""
    return batch.block_table.shape[1] * batch.kv_cache.shape[4]
