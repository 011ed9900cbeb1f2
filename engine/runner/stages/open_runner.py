"""Chooses the runner of a rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig
from engine.distributed.tp_group import ConnectedGroup, TPGroup
from engine.model.config import ModelConfig
from engine.runner.model_runner import ModelRunner


def open_runner(config: EngineConfig, model_config: ModelConfig, folder: Path, group: TPGroup) -> ModelRunner:
    """Load this rank's part of the model. group: all ranks of the engine. Raises StartupError."""
    if config.pipeline_parallel == 1:
        return ModelRunner(config, model_config, folder, group)
    from engine.runner.stages.stage_runner import StageRunner  # it needs pyzmq

    assert isinstance(group, ConnectedGroup)
    return StageRunner(config, model_config, folder, group)


def without_idle_moves(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return the options without `handoff` if it serves only to move requests, and requests cannot move with this model
    or these pipeline stages; else return the options unchanged. Raises ConfigError."""
    if config.handoff is None or config.handoff.role != "replica":
        return config
    windowed = any(group.spec.window is not None for group in model.kv_groups)
    stateful = model.recurrent is not None and (windowed or not config.enable_prefix_caching)
    movable = model.head == "lm" and not model.bidirectional and not stateful
    if movable and config.pipeline_parallel > 1:
        from engine.runner.stages.stage_runner import can_hand_over  # it needs pyzmq

        movable = can_hand_over(config, model)
    return config if movable else replace(config, handoff=None)
