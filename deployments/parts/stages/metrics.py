"""The metrics of pipeline stages."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.core import CounterMetricFamily as Counter

from deployments.observability.engine_metrics import PartMetrics, Row
from engine.wire.parts.stages import StageReport


def _stages(field: str) -> Callable[[StageReport], list[float]]:
    return lambda report: [getattr(stage, field) for stage in report.stages]


ROWS: list[Row] = [
    (
        Counter,
        "manta_stage_busy_seconds",
        "Seconds in which a pipeline stage computed, while its engine had steps under way.",
        _stages("busy_s"),
        "stage",
    ),
    (
        Counter,
        "manta_stage_wait_seconds",
        "Seconds in which a pipeline stage waited, while its engine had steps under way.",
        _stages("wait_s"),
        "stage",
    ),
]
METRICS = (PartMetrics(StageReport, ROWS),)
