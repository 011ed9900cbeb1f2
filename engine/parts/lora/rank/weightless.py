"""Adapters of a model that exists in shapes only."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.lora.model_adapters import ModelAdapters
from engine.model.models.llama import Model

MOST_TOKENS = 8192  # of a step


def extend(model: Model, config: EngineConfig) -> None:
    """Give the layers what adapters add to them, without memory."""
    if config.enable_lora:
        ModelAdapters(model, config.lora_slots, config.max_lora_rank, MOST_TOKENS, torch.device("meta"))
