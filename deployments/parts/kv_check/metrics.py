"""The metrics of cached KV that is computed again."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily as Counter

from deployments.observability.engine_metrics import PartMetrics, Row
from engine.parts.kv_check.messages import KVCheckStats

ROWS: list[Row] = [
    (
        Counter,
        "manta_kv_checks",
        "Blocks that came from a tier or another engine, were computed again, and compared.",
        "checks",
        "source",
        "result",
    ),
    (Counter, "manta_kv_check_tokens", "Tokens computed for these checks.", "tokens"),
]
METRICS = (PartMetrics(KVCheckStats, ROWS),)
