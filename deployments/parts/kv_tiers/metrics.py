"""The metrics of tiers below the KV cache, under vLLM's names where it has any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge

from deployments.observability.engine_metrics import PartMetrics, Row
from engine.wire.parts.kv_offload import KVOffloadStats


def _tiers(field: str) -> Callable[[KVOffloadStats], dict[str, Any]]:
    return lambda stats: {name: getattr(tier, field) for name, tier in stats.tiers.items()}


OF_ANSWERS: list[Row] = [
    (
        Counter,
        "vllm:external_prefix_cache_queries",
        "Prompt tokens looked up in the tiers below the KV cache.",
        "queried_tokens",
    ),
    (
        Counter,
        "vllm:external_prefix_cache_hits",
        "Prompt tokens whose KV came from these tiers.",
        "hit_tokens",
    ),
]
ROWS: list[Row] = [
    (
        Counter,
        "manta_kv_offload_gib_seconds",
        "GiB in a tier times the seconds for which they were kept, by holds or as a cache.",
        _tiers("gib_s"),
        "tier",
        "kept_by",
    ),
    (Counter, "vllm:kv_offload_tiering_read_bytes", "KV loaded from a tier.", _tiers("read_bytes"), "tier"),
    (Counter, "vllm:kv_offload_tiering_write_bytes", "KV written to a tier.", _tiers("write_bytes"), "tier"),
    (Counter, "vllm:kv_offload_tiering_read_time", "Seconds that loads took.", _tiers("read_s"), "tier"),
    (Counter, "vllm:kv_offload_tiering_write_time", "Seconds that writing took.", _tiers("write_s"), "tier"),
    (Gauge, "manta_kv_offload_used_bytes", "Space that blocks take in a tier.", _tiers("used_bytes"), "tier"),
    (Gauge, "manta_kv_offload_total_bytes", "Space of a tier.", _tiers("total_bytes"), "tier"),
    (Gauge, "manta_kv_offload_blocks", "Blocks in a tier.", _tiers("blocks"), "tier"),
    (
        Counter,
        "manta_kv_offload_errors",
        "Blocks that could not be moved: read, write, or deadline.",
        _tiers("errors"),
        "tier",
        "reason",
    ),
    (Counter, "manta_kv_offload_not_stored", "Blocks evicted before they were copied.", "not_stored"),
    (Gauge, "manta_kv_offload_loading", "Requests that wait for KV from a tier.", "loading"),
]
METRICS = (PartMetrics(KVOffloadStats, OF_ANSWERS, of_answers=True), PartMetrics(KVOffloadStats, ROWS))
