"""The check of cached KV in applications."""

from __future__ import annotations

from deployments.parts.kv_check.metrics import METRICS
from deployments.parts.setup import PartSpec

SPEC = PartSpec(metrics=METRICS)
