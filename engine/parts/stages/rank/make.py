"""Makes a rank a part of a pipeline stage."""

from __future__ import annotations

from engine.options.stages import StageOptions
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup


def make(setup: RankSetup) -> RankPart | None:
    if setup.config.of(StageOptions).pipeline_parallel_size == 1:
        return None
    from engine.parts.stages.rank.pipeline_stage import PipelineStage  # it needs pyzmq

    return PipelineStage(setup)
