"""The stages of a model in applications."""

from __future__ import annotations

from deployments.parts.setup import PartSpec
from deployments.parts.stages.metrics import METRICS

SPEC = PartSpec(metrics=METRICS)
