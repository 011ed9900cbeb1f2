"""Loads the model of an engine on one rank."""

from __future__ import annotations

import importlib
from pathlib import Path

from engine.assembly.open_runner import open_runner
from engine.config import EngineConfig
from engine.distributed.tp_group import TPGroup
from engine.model.checkpoint.overlay import engine_folder
from engine.model.config import ModelConfig
from engine.parts.setup import Loaded
from engine.parts.table import FITTINGS


def load(config: EngineConfig, group: TPGroup, host: str) -> Loaded:
    """Load this rank's part of the model. Every rank has to call this within `group.starting()`. Raises StartupError,
    as if the options do not suit the model."""
    folder = engine_folder(config)
    config, model = read_model(config, folder)
    return Loaded(config, model, folder, open_runner(config, model, folder, group, host))


def read_model(config: EngineConfig, folder: Path) -> tuple[EngineConfig, ModelConfig]:
    """Return the options and the model in a folder, fitted to each other: the same on all ranks. Raises
    StartupError."""
    model = ModelConfig.from_folder(folder, config.quantization, config.max_model_len, config.language_model_only)
    for name in FITTINGS:
        config, model = importlib.import_module(f"..parts.{name}.fitting", __package__).fit(config, model)
    return config, model
