"""FlashInfer, arXiv:2501.01005, for steps that only decode. Written for 0.7.2.post1.

Its functions are not documented to support length 0, so padding reads one token of some block. Rows of padding are not
used.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops.gpu.libraries.choice import Attend, longest

WORKSPACE_BYTES = 256 << 20  # partial results, after counters that must be 0 and that FlashInfer resets
COUNTER_BYTES = 4 << 20  # for trtllm-gen, 4 per query head and sequence; without them, each launch fills new ones


def decode(device: torch.device) -> Attend:
    """Load paged attention: `xqa` kernels on Hopper and RTX cards, `trtllm-gen` on Blackwell."""
    function = importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
    workspace, counters = zeros(WORKSPACE_BYTES, device), zeros(COUNTER_BYTES, device)

    def attend(q: Tensor, batch: Batch, layer: int, scale: float, window: int | None) -> Tensor:
        out: Tensor = function(
            q.contiguous(), batch.kv_cache[:, layer].unbind(1), workspace, batch.block_table.contiguous(),
            at_least_one(batch), longest(batch), bmm1_scale=scale, bmm2_scale=1.0,
            window_left=-1 if window is None else window - 1, kv_layout="HND",
            multi_ctas_kv_counter_buffer=if_enough(counters, q),
        )  # fmt: skip
        return out

    return attend


def zeros(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


def if_enough(counters: Tensor, q: Tensor) -> Tensor | None:
    """Return the counters if there is one for each head and sequence. q: [seqs, heads, head_dim]."""
    return counters if 4 * q.shape[0] * q.shape[1] <= len(counters) else None


def at_least_one(batch: Batch) -> Tensor:
    """Return the lengths of sequences, 1 for padding; the first layer computes them for all layers."""
    if "at least 1" not in batch.plans:
        batch.plans["at least 1"] = batch.kv_len.clamp(min=1)
    lengths: Tensor = batch.plans["at least 1"]
    return lengths
