"""The metrics of images."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily as Counter

from deployments.observability.engine_metrics import PartMetrics, Row
from engine.wire.parts.images import ImageStats

ROWS: list[Row] = [
    (Counter, "manta_images_encoded", "Images that the vision encoder has computed.", "encoded"),
    (Counter, "manta_encoder_cache_hits", "Images whose embeddings a step found in the cache.", "cache_hits"),
]
METRICS = (PartMetrics(ImageStats, ROWS, absent=ImageStats(0, 0)),)
