"""The metrics of holds."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge

from deployments.observability.engine_metrics import PartMetrics, Row
from engine.wire.parts.holds import HoldStats

ROWS: list[Row] = [
    (Gauge, "manta_holds", "Prompts that clients hold in the KV cache.", "holds"),
    (Gauge, "manta_held_blocks", "KV blocks that holds keep.", "blocks"),
    (Gauge, "manta_max_held_blocks", "Maximum number of KV blocks that holds keep, without tiers.", "max_blocks"),
    (
        Counter,
        "manta_holds_unused_block_seconds",
        "KV blocks on the device times the seconds for which holds kept them that no later request has used.",
        "unused_block_s",
    ),
    (Counter, "manta_holds_granted", "Holds that were granted.", "granted"),
    (Counter, "manta_holds_refused", "Holds that were refused, by reason.", "refused", "reason"),
    (Counter, "manta_holds_ended", "Holds that ended, by reason.", "ended", "reason"),
]
METRICS = (PartMetrics(HoldStats, ROWS),)
