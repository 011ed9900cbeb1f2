"""Fits the options to models that take a whole prompt in one step."""

from __future__ import annotations

from dataclasses import replace

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.config import ModelConfig


def fit(config: EngineConfig, model: ModelConfig) -> tuple[EngineConfig, ModelConfig]:
    """Make steps large enough for a whole prompt. Raises ConfigError if an option rules that out."""
    if not model.bidirectional:
        return config, model
    if config.handoff is not None:
        raise ConfigError(
            "handoff", config.handoff.role, "left out, because this model keeps no KV that could be handed over"
        )
    if config.torch_compile:
        raise ConfigError("torch_compile", True, "left out, because only models that generate are compiled")
    longest = model.longest_sequence(config.max_model_len)
    return replace(config, max_num_batched_tokens=max(config.max_num_batched_tokens, longest)), model
