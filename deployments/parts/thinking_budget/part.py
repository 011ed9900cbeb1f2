"""The thinking budgets in applications."""

from __future__ import annotations

from deployments.openai.served.model_part import ModelPart
from deployments.parts.setup import ModelSetup, PartSpec
from deployments.parts.thinking_budget.fields import ThinkingFields
from deployments.parts.thinking_budget.thinking_budget import ThinkingBudgets


def _model(setup: ModelSetup) -> ModelPart:
    return ThinkingBudgets(setup.model.format, setup.model.markers)


SPEC = PartSpec(model=_model, fields=(ThinkingFields,))
