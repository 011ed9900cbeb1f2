"""Fits a model to its drafter."""

from __future__ import annotations

from dataclasses import replace

from engine.config import EngineConfig
from engine.model.config import ModelConfig


def fit(config: EngineConfig, model: ModelConfig) -> tuple[EngineConfig, ModelConfig]:
    """Let the first KV cache group keep all KV for a drafter, whose KV has the blocks of this group: it may attend
    beyond the model's window."""
    drafts = config.speculative_config is not None and config.speculative_config.has_weights
    if drafts and model.kv_groups[0].spec.window is not None:
        model = replace(model, keeps_all_kv=True)
    return config, model
