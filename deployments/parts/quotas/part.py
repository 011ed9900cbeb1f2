"""The quotas of keys in applications."""

from __future__ import annotations

from deployments.openai.served.model_part import ModelPart
from deployments.parts.quotas.quota_part import QuotaChecks, QuotaEdge
from deployments.parts.setup import ModelSetup, PartSpec


def _model(setup: ModelSetup) -> ModelPart:
    return QuotaChecks(has_priorities=setup.model.info.has_priorities)


SPEC = PartSpec(edge=lambda setup: QuotaEdge(setup.quotas), model=_model)
