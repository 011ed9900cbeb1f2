"""Configurations without a folder."""

from __future__ import annotations

from typing import Any

from engine.model.config import ModelConfig
from engine.model.config_parts.pooling import PoolingConfig
from engine.model.config_parts.rope import RopeConfig


def tiny_config(**fields: Any) -> ModelConfig:
    defaults: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "vocab_size": 97,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "attention_scale": 8**-0.5,
        "activation": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "rope": (RopeConfig(),),
        "window": (None,) * fields.get("num_layers", 1),
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "eos_token_ids": frozenset({2}),
        "moe": None,
        "pooling": PoolingConfig(),
    }
    return ModelConfig(**{**defaults, **fields})
