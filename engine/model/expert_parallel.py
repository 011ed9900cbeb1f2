"""Checks whether the experts of a model can be spread over ranks. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.model.config import ModelConfig

if TYPE_CHECKING:
    from engine.config import EngineConfig


def check_experts(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError if the experts of a model cannot be spread over its ranks. The experts of a model that
    transformers' own code computes are known only once the model is built."""
    if not config.expert_parallel or model.transformers:
        return
    if model.moe is None:
        raise ConfigError("expert_parallel", True, f"left out for {model.architecture}, which has no experts")
    check_count(model.moe.num_experts, config.tensor_parallel)


def check_count(num_experts: int, ranks: int) -> None:
    """Raise ConfigError if a rank would have no expert."""
    if num_experts < ranks:
        limit = f"at most the model's number of experts ({num_experts}) with expert_parallel"
        raise ConfigError("tensor_parallel", ranks, limit)
