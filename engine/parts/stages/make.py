"""Makes what fills the stages of a pipeline."""

from __future__ import annotations

from engine.parts.setup import Made, PartSetup
from engine.parts.stages.micro_batches import MicroBatches


def make(setup: PartSetup) -> Made:
    stages, vision = setup.loaded.config.pipeline_parallel_size, setup.loaded.model.vision
    if stages == 1:
        return Made()
    return Made([MicroBatches(stages, 0 if vision is None else vision.mm_tokens_per_image)])
