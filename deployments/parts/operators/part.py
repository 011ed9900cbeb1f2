"""The operators' routes in applications."""

from __future__ import annotations

from deployments.parts.operators.routes import OperatorRoutes
from deployments.parts.setup import PartSpec

SPEC = PartSpec(edge=lambda setup: OperatorRoutes(setup.models, setup.telemetry, setup.metrics))
