"""FlashMLA, github.com/deepseek-ai/FlashMLA, for latent attention of steps that only decode, on Hopper. It takes
blocks of 64 tokens, vectors of 576 or 512 numbers and latents of 512. Written for commit 9241ae3; has not run on a GPU
yet.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops.gpu.libraries.choice import Attend


def decode(device: torch.device) -> Attend:
    flash_mla = importlib.import_module("flash_mla")

    def attend(q: Tensor, batch: Batch, layer: int, scale: float, rank: int) -> Tensor:
        # the first layer's launch divides the keys of all sequences over the GPU, and the others use its division
        if "FlashMLA" not in batch.plans:
            batch.plans["FlashMLA"], _ = flash_mla.get_mla_metadata()
        out: Tensor = flash_mla.flash_mla_with_kvcache(
            q.contiguous()[:, None], batch.kv_cache[:, layer, 0].transpose(1, 2), batch.block_table, batch.kv_len,
            rank, batch.plans["FlashMLA"], softmax_scale=scale,
        )[0]  # fmt: skip
        return out[:, 0]

    return attend
