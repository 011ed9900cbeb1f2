"""The predictions of answers in applications."""

from __future__ import annotations

from deployments.openai.served.model_part import ModelPart
from deployments.parts.prediction.fields import PredictionFields
from deployments.parts.prediction.metrics import METRICS
from deployments.parts.prediction.prediction import Predictions
from deployments.parts.setup import ModelSetup, PartSpec


def _model(setup: ModelSetup) -> ModelPart:
    info = setup.model.info
    return Predictions(setup.model.tokenizer, info.max_model_len, drafts=info.drafts)


SPEC = PartSpec(model=_model, fields=(PredictionFields,), metrics=METRICS)
