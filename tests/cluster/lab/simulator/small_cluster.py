"""Clusters that are small enough for tests to run out of blocks, slots and budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.config.simulation_options import RouterName
from cluster.lab.simulator.cost_model import CARDS, MODELS, roofline
from cluster.lab.simulator.spec import ClusterSpec, TierSpec
from engine.config import EngineConfig
from engine.model.kv_groups import KVCacheSpec

MODEL, CARD = MODELS["llama-3.1-8b"], CARDS["h100"]
BLOCK = 16
FULL, WINDOW = (KVCacheSpec(num_kv_heads=1, head_dim=16, window=window) for window in (None, 100))


def small_engine(**options: Any) -> EngineConfig:
    sizes = {"block_size": BLOCK, "max_num_batched_tokens": 512, "max_num_seqs": 8}
    return EngineConfig(**sizes | options, max_waiting=10**9)


def small_cluster(
    prefill: int = 0,
    *,
    replicas: int = 2,
    num_blocks: int = 400,
    tiers: Sequence[TierSpec] = (),
    router: RouterName = "random",
    **options: Any,
) -> ClusterSpec:
    """options: of the engines."""
    return ClusterSpec(
        replicas=replicas,
        prefill_replicas=prefill,
        engine=small_engine(**options),
        cost=roofline(MODEL, CARD),
        num_blocks=num_blocks,
        tiers=tuple(tiers),
        router=router,
        kv_bytes=MODEL.kv_bytes,
        max_model_len=num_blocks * BLOCK,
    )
