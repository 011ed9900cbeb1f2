"""Fits handoffs to models whose requests cannot move."""

from __future__ import annotations

from dataclasses import replace

from engine.config import EngineConfig
from engine.model.config import ModelConfig


def fit(config: EngineConfig, model: ModelConfig) -> tuple[EngineConfig, ModelConfig]:
    """Leave `handoff` out if it serves only to move requests, and this model's requests cannot move."""
    if config.handoff is None or config.handoff.role != "replica":
        return config, model
    windowed = any(group.spec.window is not None for group in model.kv_groups)
    stateful = model.recurrent is not None and (windowed or not config.enable_prefix_caching)
    movable = model.head == "lm" and not model.bidirectional and not stateful
    return config if movable else replace(config, handoff=None), model
