"""The adapters in applications."""

from __future__ import annotations

from deployments.edge_part import EdgePart
from deployments.parts.adapters.adapter_models import AdapterModels
from deployments.parts.adapters.metrics import METRICS
from deployments.parts.adapters.routes import AdapterRoutes
from deployments.parts.setup import EdgeSetup, PartSpec


def _edge(setup: EdgeSetup) -> EdgePart:
    models = AdapterModels(setup.models, setup.scope, setup.telemetry.peers)
    may_change = setup.auth.allow_runtime_lora_updating
    return AdapterRoutes(setup.models, models, setup.bodies, may_change=may_change)


SPEC = PartSpec(edge=_edge, metrics=METRICS)
