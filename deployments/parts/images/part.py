"""The images of prompts in applications."""

from __future__ import annotations

from deployments.openai.served.model_part import ModelPart
from deployments.parts.images.image_inputs import ImageInputs
from deployments.parts.images.metrics import METRICS
from deployments.parts.setup import ModelSetup, PartSpec


def _model(setup: ModelSetup) -> ModelPart:
    info = setup.model.info
    return ImageInputs(info.name, info.max_model_len, setup.images)


SPEC = PartSpec(model=_model, metrics=METRICS)
