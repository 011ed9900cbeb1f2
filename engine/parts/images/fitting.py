"""Fits the options to models that read images, and to engines that only encode them."""

from __future__ import annotations

from dataclasses import replace

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.models.images.encoder_config import encoder_config


def fit(config: EngineConfig, model: ModelConfig) -> tuple[EngineConfig, ModelConfig]:
    """Leave out the language model of an engine that only encodes images. Raises ConfigError if an image could wait
    forever because all of its tokens must be in one step."""
    size = model.longest_span
    needed = size + config.max_num_seqs - 1
    if size and config.max_num_batched_tokens < needed:
        limit = f"at least {needed}: a step computes all {size} tokens of an image, and one of each other sequence"
        raise ConfigError("max_num_batched_tokens", config.max_num_batched_tokens, limit)
    if config.handoff is not None and config.handoff.role == "encode":
        return images_only(config), encoder_config(model)
    return config, model


def images_only(config: EngineConfig) -> EngineConfig:
    """Return the options of an engine that only encodes images, with all options for language models off."""
    return replace(
        config, speculative_config=None, kv_cache_dtype="auto", enable_expert_parallel=False, enable_eplb=False,
        **config.without_layers(),
    )  # fmt: skip
