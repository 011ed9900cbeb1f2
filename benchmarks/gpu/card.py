"""A GPU's own rates, and the least time that they leave for a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.memory_floor import kv_bytes
from engine.model.config import ModelConfig

COPY_BYTES = 2**32
MATRIX = 8192
REPEATS = 10


@dataclass(frozen=True, slots=True)
class Card:
    bytes_per_s: float  #: read plus written, while a large tensor is copied
    flops: float  #: per second, in a product of two large bfloat16 matrices


CARDS = {"H100": Card(3.0e12, 7.98e14), "H200": Card(4.3e12, 7.9e14)}
"""What others have measured; both are SXM modules."""


def device_seconds(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Time the fastest of `repeats` runs, by the card's clock."""
    run()
    best = float("inf")
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


def graph_seconds(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """The same of a CUDA graph of the run, in which the host takes no part."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return device_seconds(graph.replay, repeats)


def copy_rate(device: str) -> dict[str, float]:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return {"GB/s": 2 * COPY_BYTES / device_seconds(lambda: target.copy_(source)) / 1e9}


def matrix_rate(device: str) -> dict[str, float]:
    a, b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device=device) for _ in range(2))
    return {"TFLOP/s": 2 * MATRIX**3 / device_seconds(lambda: a @ b) / 1e12}


def linear_parameters(config: ModelConfig) -> int:
    """Parameters of the layers' matrices that a token is multiplied with."""
    heads = config.num_heads + 2 * config.num_kv_heads
    attention = config.hidden_size * config.head_dim * (heads + config.num_heads)
    intermediate = config.intermediate_size
    if config.moe is not None:
        intermediate = config.moe.experts_per_token * config.moe.intermediate_size
    return config.num_layers * (attention + 3 * config.hidden_size * intermediate)


def prompt_flops(config: ModelConfig, tokens: int) -> float:
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * tokens**2  # causal: half of 4 h d T^2
    return float(2 * linear_parameters(config) * tokens + attention)


def step_bytes(config: ModelConfig, weight_bytes: float, kv_dtype: torch.dtype, lengths: list[int]) -> float:
    return weight_bytes + kv_bytes(config, kv_dtype, lengths)
