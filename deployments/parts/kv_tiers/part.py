"""The tiers of KV in applications."""

from __future__ import annotations

from deployments.parts.kv_tiers.metrics import METRICS
from deployments.parts.setup import PartSpec

SPEC = PartSpec(metrics=METRICS)
