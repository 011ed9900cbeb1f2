"""The fetching of KV in applications."""

from __future__ import annotations

from deployments.parts.kv_fetching.metrics import METRICS
from deployments.parts.setup import PartSpec

SPEC = PartSpec(metrics=METRICS)
