"""Chooses the runner of a rank."""

from __future__ import annotations

from pathlib import Path

from engine.config import EngineConfig
from engine.distributed.tp_group import ConnectedGroup, TPGroup
from engine.kernel_trial.check import check_kernels
from engine.model.config import ModelConfig
from engine.runner.model_runner import ModelRunner


def open_runner(config: EngineConfig, model_config: ModelConfig, folder: Path, group: TPGroup) -> ModelRunner:
    """Load this rank's part of the model. group: all ranks of the engine. Raises StartupError."""
    check_kernels(config, model_config, folder, ModelRunner)
    if config.pipeline_parallel_size == 1:
        return ModelRunner(config, model_config, folder, group)
    from engine.distributed.data_parallel_group import DataParallelGroup  # both need pyzmq
    from engine.runner.stages.stage_runner import StageRunner

    ranks = group.own if isinstance(group, DataParallelGroup) else group
    assert isinstance(ranks, ConnectedGroup)
    return StageRunner(config, model_config, folder, ranks, group)
