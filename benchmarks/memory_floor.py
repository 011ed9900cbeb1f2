"""The minimum time of a decode step: reading its weights, KV and states once from memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from engine.model.config import ModelConfig
from engine.model.layers.embedding import VocabEmbedding
from engine.model.layers.linear import Linear
from engine.model.layers.moe import Experts
from engine.model.models.registry import build_model
from engine.model.quantization.format import StoredWeight
from engine.model.shard import ShardPlan
from engine.model.state import state_specs

READ_BYTES = 2**29  # far more than caches hold
READS = 8


def weight_bytes(config: ModelConfig, dtype: torch.dtype, batch_size: int) -> float:
    """Return the bytes of weights that a step of `batch_size` tokens reads: only the tokens' rows of an embedding,
    unless the head shares its matrix, and as many experts as an even choice would pick."""
    model = build_model(config, ShardPlan(), dtype, "meta")  # shapes only; loaded weights may be packed by now
    total = float(sum(p.nbytes for p in model.parameters()))  # a shared matrix once
    head = None if model.lm_head is None else model.lm_head.weight
    for layer in model.modules():
        if isinstance(layer, VocabEmbedding) and layer.weight is not head:
            total -= layer.weight.nbytes * max(0.0, 1 - batch_size / len(layer.weight))
        elif isinstance(layer, Linear) and isinstance(layer.stored, StoredWeight):
            total += layer.stored.nbytes
        elif isinstance(layer, Experts) and config.moe is not None:
            idle = (1 - config.moe.experts_per_token / config.moe.num_experts) ** batch_size
            total -= idle * sum(p.nbytes for p in layer.parameters())
            total += (1 - idle) * layer.quantized_parameters * dtype.itemsize  # they are dequantized when loaded
    return total


def kv_bytes(config: ModelConfig, dtype: torch.dtype, lengths: Sequence[int]) -> float:
    """Return the bytes of KV, and of states with half of the rows since their last border, that are read for one more
    token of each sequence. lengths: tokens so far."""
    kept = sum(
        group.token_numbers() * min(length, group.spec.window or length)
        for group in config.kv_groups
        for length in lengths
    )
    states = state_specs(config.recurrent, str(dtype).removeprefix("torch."))
    return float(kept * dtype.itemsize + len(lengths) * sum(spec.kept_bytes + spec.row_bytes // 2 for spec in states))


def measure_bandwidth(device: torch.device) -> float:
    """Return the bytes per second at which torch reads a large tensor with all its threads; the best of several."""
    floats = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    integers = floats.view(torch.int64)
    # which of the two is held up by memory alone depends on the machine
    reads: tuple[Callable[[], object], ...] = (lambda: torch.dot(floats, floats), integers.sum)
    return READ_BYTES / min(seconds_of(read, device) for _ in range(READS) for read in reads)


def seconds_of(read: Callable[[], object], device: torch.device) -> float:
    synchronise(device)
    started = time.perf_counter()
    read()
    synchronise(device)
    return time.perf_counter() - started


def synchronise(device: torch.device) -> None:
    """Wait for the device: without that a clock on the host sees launches only."""
    if device.type == "cuda":
        torch.cuda.synchronize()
