"""Makes what fills the stages of a pipeline."""

from __future__ import annotations

from engine.parts.setup import Made, PartSetup
from engine.parts.stages.micro_batches import MicroBatches


def make(setup: PartSetup) -> Made:
    stages = setup.loaded.config.pipeline_parallel_size
    if stages == 1:
        return Made()
    return Made([MicroBatches(stages, setup.loaded.model.longest_span)])
