"""The API keys that change in applications."""

from __future__ import annotations

from deployments.edge_part import EdgePart
from deployments.parts.keys.routes import KeyRoutes
from deployments.parts.setup import EdgeSetup, PartSpec


def _edge(setup: EdgeSetup) -> EdgePart | None:
    if setup.api_keys is None or not setup.auth.allow_runtime_key_updating:
        return None
    return KeyRoutes.of(setup.store, setup.api_keys, setup.quotas, setup.auth.key_limits)


SPEC = PartSpec(edge=_edge)
