"""The check for silent data corruption in applications."""

from __future__ import annotations

from deployments.openai.served.model_part import ModelPart
from deployments.parts.sdc_check.sdc_check import SdcCheck
from deployments.parts.setup import ModelSetup, PartSpec


def _model(setup: ModelSetup) -> ModelPart | None:
    model = setup.model
    every, frontend = model.info.sdc_check_every, model.frontend
    if every is None:
        return None
    return SdcCheck(every, model.pool, frontend.channel, model.admission, frontend.stats, exact=model.info.same_bits)


SPEC = PartSpec(model=_model)
