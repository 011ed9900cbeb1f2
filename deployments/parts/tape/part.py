"""The tape in applications."""

from __future__ import annotations

from deployments.edge_part import EdgePart
from deployments.parts.setup import EdgeSetup, PartSpec
from deployments.parts.tape.routes import TapeRoutes


def _edge(setup: EdgeSetup) -> EdgePart:
    return TapeRoutes(setup.models, setup.telemetry)


SPEC = PartSpec(edge=_edge)
