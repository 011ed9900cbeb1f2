"""The metrics of what engines spend."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily as Counter

from deployments.observability.engine_metrics import PartMetrics, Row
from engine.wire.parts.costs import CostStats

ROWS: list[Row] = [
    (Counter, "manta_engine_seconds", "Seconds of the engine, by what they were spent on.", "seconds", "spent_on"),
    (Counter, "manta_engine_kv_gib_seconds", "GiB of KV cache times the seconds for which they were used.", "kv_gib_s"),
]
METRICS = (PartMetrics(CostStats, ROWS, of_answers=True),)
