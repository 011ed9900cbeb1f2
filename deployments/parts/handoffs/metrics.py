"""The metrics of what engines decide about handoffs."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily as Counter

from deployments.observability.engine_metrics import PartMetrics, Row
from engine.wire.parts.handoffs import HandoffTotals

ROWS: list[Row] = [
    (
        Counter,
        "pd_decision",
        "Prompts by where they were computed, and by the reason.",
        "prefill_decisions",
        "where",
        "reason",
    ),
    (Counter, "manta_moves", "Running requests that moved, by outcome.", "moves", "outcome"),
]
METRICS = (PartMetrics(HandoffTotals, ROWS, absent=HandoffTotals()),)
