"""The metrics of experts that are divided among ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge

from deployments.observability.engine_metrics import PartMetrics, Row
from engine.wire.parts.experts import ExpertReport, SharedSteps


def _experts(field: str) -> Callable[[ExpertReport], dict[int, Any]]:
    return lambda report: {experts.stage: getattr(experts, field) for experts in report.stages}


ROWS: list[Row] = [
    (
        Gauge,
        "manta_expert_balancedness",
        "Mean load of a rank's experts divided by the maximum, in the last window.",
        _experts("balancedness"),
        "stage",
    ),
    (
        Counter,
        "manta_expert_tokens",
        "Tokens for which a rank computed one of its experts, over all layers.",
        _experts("rank_tokens"),
        "stage",
        "rank",
    ),
    (Counter, "manta_experts_moved", "Copies of experts that moved between ranks.", _experts("moved"), "stage"),
    (
        Gauge,
        "manta_expert_moves_stopped",
        "1 if experts move no more, because a rank failed while it sent or received some.",
        _experts("stopped"),
        "stage",
    ),
]
SHARED: list[Row] = [
    (
        Counter,
        "manta_shared_steps",
        "Steps with engines that share experts: own ones, and those in which an engine only served others.",
        "steps",
        "kind",
    ),
    (
        Counter,
        "manta_shared_wait_seconds",
        "Seconds in which an engine waited for engines that share its experts to begin a step.",
        "wait_s",
    ),
]
METRICS = (PartMetrics(ExpertReport, ROWS), PartMetrics(SharedSteps, SHARED))
