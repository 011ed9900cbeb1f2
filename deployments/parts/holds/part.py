"""The holds of clients in applications."""

from __future__ import annotations

from deployments.parts.holds.fields import ChatHoldFields, HoldFields
from deployments.parts.holds.hold_requests import HoldRequests
from deployments.parts.holds.metrics import METRICS
from deployments.parts.holds.routes import HoldRoutes
from deployments.parts.setup import PartSpec

SPEC = PartSpec(
    edge=lambda setup: HoldRoutes(setup.models),
    model=lambda setup: HoldRequests(setup.model),
    fields=(HoldFields, ChatHoldFields),
    metrics=METRICS,
)
