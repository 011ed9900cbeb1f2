"""What a rank has loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig
from engine.model.config import ModelConfig
from engine.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model on all ranks of an engine, from which the other parts are built."""

    config: EngineConfig
    model: ModelConfig
    folder: Path
    runner: ModelRunner
