"""What the configuration says of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model of the configuration, as parts read it."""

    name: str
    section: Mapping[str, Any]
    """Keys and values of its section."""
    engine: EngineConfig
    """Options of the engines that answer requests."""
