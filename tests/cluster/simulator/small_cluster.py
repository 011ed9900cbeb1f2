"""Clusters that are small enough for tests to run out of blocks, slots and budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster.simulator.hardware import CARDS, MODELS, roofline
from cluster.simulator.spec import ClusterSpec, PoolSpec
from engine.config import EngineConfig

MODEL, CARD = MODELS["llama-3.1-8b"], CARDS["h100"]
BLOCK = 16


def small_pool(replicas: int = 2, *, num_blocks: int = 400, router: str = "random", **options: Any) -> PoolSpec:
    """options: of the engines."""
    config = EngineConfig(**{"block_size": BLOCK, "max_num_batched_tokens": 512, "max_num_seqs": 8} | options)
    cost = roofline(MODEL, CARD)
    return PoolSpec(
        replicas=replicas, config=replace(config, max_waiting=10**9), cost=cost, num_blocks=num_blocks, router=router
    )


def small_cluster(prefill: int = 0, **options: Any) -> ClusterSpec:
    pool = small_pool(**options)
    return ClusterSpec(
        decode=pool,
        prefill=replace(pool, replicas=prefill) if prefill else None,
        kv_bytes=MODEL.kv_bytes,
        max_model_len=pool.num_blocks * BLOCK,
    )
