"""Latent attention by the fastest library that works here, with the op's signature (`select_latent` in
ops/attention.py).

FlashMLA and FlashAttention 3 compute it on Hopper, FlashInfer and FlashAttention 4 on Blackwell. FlashAttention
computes any step, the others only steps that decode. Our Triton kernel (../latent_attention.py) computes the rest.

FlashInfer's `BatchMLAPagedAttentionWrapper`, which also runs on Hopper, is not used: its `plan` divides the keys on the
host, so a CUDA graph would need the host to know all lengths before each replay. All functions used here divide keys
on the device.
"""

from __future__ import annotations

from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops import attention_plain
from engine.model.ops.gpu import latent_attention as triton_kernel
from engine.model.ops.gpu.libraries import flash_attention, flash_infer, flash_mla
from engine.model.ops.gpu.libraries.choice import DTYPES, Library, Op, Shape, select

OP = Op(
    "latent attention",
    (  # the first that supports chunks and works here computes prompts
        Library("FlashMLA", ((9, 0),), flash_mla.decode, chunks=False),
        Library("FlashInfer", ((10, 0), (10, 3)), flash_infer.decode_latents, chunks=False),
        Library("FlashAttention 4", ((10, 0), (10, 3)), flash_attention.latents_version_4, chunks=True),
        Library("FlashAttention 3", ((9, 0),), flash_attention.latents_version_3, chunks=True),
    ),
    ours=triton_kernel.latent_attention,
    plain=attention_plain.latent_attention,
)


def latent_attention(q: Tensor, batch: Batch, layer: int, scale: float, rank: int) -> Tensor:
    if batch.kv_cache.dtype == q.dtype and q.dtype in DTYPES:
        *_, block_size, head_dim = batch.kv_cache.shape
        shape = Shape(q.dtype, q.shape[1], 1, block_size, head_dim, rank=rank)
        attend = select(OP, q.device, shape)[len(batch.chunks) > 0]
        if attend is not None:
            return attend(q, batch, layer, scale, rank)
    return triton_kernel.latent_attention(q, batch, layer, scale, rank)
