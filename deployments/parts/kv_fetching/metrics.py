"""The metrics of KV that other engines have cached."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily as Counter

from deployments.observability.engine_metrics import PartMetrics, Row
from engine.wire.parts.kv_fetching import FetchStats

ROWS: list[Row] = [
    (Counter, "manta_kv_fetched_tokens", "Prompt tokens whose KV another engine had cached.", "fetched_tokens"),
    (Counter, "manta_kv_fetches", "Prompts of which another engine had more cached, by outcome.", "fetches", "outcome"),
]
METRICS = (PartMetrics(FetchStats, ROWS, absent=FetchStats({}, 0)),)
