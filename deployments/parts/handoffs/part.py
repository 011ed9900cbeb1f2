"""The handoffs in applications."""

from __future__ import annotations

from deployments.parts.handoffs.metrics import METRICS
from deployments.parts.setup import PartSpec

SPEC = PartSpec(metrics=METRICS)
