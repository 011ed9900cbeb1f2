"""Paged attention by the fastest library that works here, with the op's signature (ops/attention.py).

FlashInfer, arXiv:2501.01005, computes steps that only decode; FlashAttention 4, 3 or 2, arXiv:2407.08608, computes any
step. Our Triton kernels (../attention.py) compute the rest: all steps if there is no library, and in any case caches in
float8, float32, softcaps, sinks, chunks, and images whose tokens see each other.

FlashInfer's kernels on Hopper split all sequences of a batch into the same number of parts, whatever their length; our
kernel splits by length. FlashAttention 2 refuses blocks that are no multiples of 256 tokens. torch's varlen attention
is not used, because its split path leaves out rows (pytorch #194167).
"""

from __future__ import annotations

from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops import attention as plain_attention
from engine.model.ops.gpu import attention
from engine.model.ops.gpu.libraries import flash_attention, flash_infer
from engine.model.ops.gpu.libraries.choice import DTYPES, AttentionShape, Library, Op, select
from engine.model.ops.gpu.rope import rotate_and_write

__all__ = ["paged_attention", "rotate_and_write"]

OP = Op(
    "attention",
    (  # the first that supports chunks and works here computes prompts
        Library("FlashInfer", ((9, 0), (10, 0), (10, 3), (12, 0), (12, 1)), flash_infer.decode, chunks=False),
        Library("FlashAttention 2", ((8, 0), (8, 6), (8, 9)), flash_attention.version_2, chunks=True),
        Library("FlashAttention 3", ((9, 0),), flash_attention.version_3, chunks=True),
        Library("FlashAttention 4", ((9, 0), (10, 0), (10, 3)), flash_attention.version_4, chunks=True),
    ),
    ours=attention.paged_attention,
    plain=plain_attention.paged_attention,
)


def paged_attention(
    q: Tensor, batch: Batch, layer: int, scale: float, window: int | None = None,
    *, softcap: float | None = None, sinks: Tensor | None = None, chunk: int | None = None,
) -> Tensor:  # fmt: skip
    plain_scores = softcap is None and sinks is None and chunk is None and batch.span_ends is None
    if plain_scores and batch.kv_cache.dtype == q.dtype and q.dtype in DTYPES:
        _, _, _, kv_heads, block_size, head_dim = batch.kv_cache.shape
        shape = AttentionShape(q.dtype, q.shape[1], kv_heads, block_size, head_dim, window)
        attend = select(OP, q.device, shape)[len(batch.chunks) > 0]
        if attend is not None:
            return attend(q, batch, layer, scale, window)
    return attention.paged_attention(q, batch, layer, scale, window, softcap=softcap, sinks=sinks, chunk=chunk)
