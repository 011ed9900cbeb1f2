"""The metrics of adapters."""

from __future__ import annotations

import time

from prometheus_client.core import GaugeMetricFamily as Gauge

from deployments.observability.engine_metrics import PartMetrics, Row
from engine.lora.messages import AdapterStats


def _requests(stats: AdapterStats) -> dict[int, dict[str, dict[str, float]]]:
    """Return the current time, labelled with the names of running and waiting adapters, as vLLM does. Only the labels
    matter."""
    return {stats.max_loras: {",".join(stats.running): {",".join(stats.waiting): time.time()}}}


ROWS: list[Row] = [
    (
        Gauge,
        "vllm:lora_requests_info",
        "Slots for LoRA adapters, and the adapters of running and of waiting requests.",
        _requests,
        "max_lora",
        "running_lora_adapters",
        "waiting_lora_adapters",
    ),
    (Gauge, "manta_adapters_resident", "LoRA adapters in slots.", lambda stats: len(stats.resident)),
]
METRICS = (PartMetrics(AdapterStats, ROWS),)
