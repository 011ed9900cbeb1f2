"""The sessions of clients in applications."""

from __future__ import annotations

from deployments.parts.sessions.observers import SessionSequences
from deployments.parts.sessions.routes import SessionRoutes
from deployments.parts.setup import PartSpec

SPEC = PartSpec(
    edge=lambda setup: SessionRoutes(setup.store, setup.models),
    model=lambda setup: SessionSequences(setup.model.info),
)
