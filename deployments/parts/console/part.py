"""The console in applications."""

from __future__ import annotations

from deployments.edge_part import EdgePart
from deployments.parts.console.routes import ConsoleRoutes
from deployments.parts.setup import EdgeSetup, PartSpec


def _edge(setup: EdgeSetup) -> EdgePart | None:
    return ConsoleRoutes(setup.models, setup.telemetry, setup.console) if setup.console.enabled else None


SPEC = PartSpec(edge=_edge)
