"""The costs of requests in applications."""

from __future__ import annotations

from deployments.parts.costs.metrics import METRICS
from deployments.parts.setup import PartSpec

SPEC = PartSpec(metrics=METRICS)
