"""The configuration of an encode pool's model. It needs no code of a vision encoder, whose import takes seconds."""

from __future__ import annotations

from dataclasses import replace

from engine.errors import ConfigError
from engine.model.config import ModelConfig

ARCHITECTURE = "ImageEncoder"


def encoder_config(config: ModelConfig) -> ModelConfig:
    """Return the configuration of an engine that encodes images for engines with `config`. Raises ConfigError.

    A token's embedding, and its features for each of the first layers (deepstack), each take the K and V of one layer.
    """
    if config.vision is None:
        raise ConfigError("encode", config.architecture, "left out: this model reads text only")
    return replace(
        config,
        architecture=ARCHITECTURE,
        num_layers=1 + config.vision.deepstack,
        num_heads=1,
        num_kv_heads=1,
        head_dim=config.hidden_size // 2,
        rope=config.rope[:1],
        window=(None,) * (1 + config.vision.deepstack),
        vision=replace(config.vision, rope_axes=()),
        mixins=(),
        layer_kv=(),
    )
