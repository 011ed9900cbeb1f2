"""The experts in applications."""

from __future__ import annotations

from deployments.parts.experts.metrics import METRICS
from deployments.parts.setup import PartSpec

SPEC = PartSpec(metrics=METRICS)
