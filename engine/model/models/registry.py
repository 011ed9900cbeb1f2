"""Architecture in config.json -> model."""

from __future__ import annotations

import torch

from engine.distributed.tp_group import TPGroup
from engine.errors import UnsupportedArchitecture
from engine.model.config import ModelConfig
from engine.model.models.gemma3 import Gemma3ForCausalLM
from engine.model.models.llama import LlamaForCausalLM
from engine.model.models.mistral import MistralForCausalLM
from engine.model.models.qwen2 import Qwen2ForCausalLM
from engine.model.models.qwen3 import Qwen3ForCausalLM
from engine.model.models.qwen3_moe import Qwen3MoeForCausalLM

Model = LlamaForCausalLM  # every family has its interface: packed, forward(input_ids, batch), logits and best(hidden)
MODELS: dict[str, type[Model]] = {
    cls.__name__: cls
    for cls in (
        LlamaForCausalLM,
        MistralForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
        Qwen3MoeForCausalLM,
        Gemma3ForCausalLM,
    )
}


def build_model(cfg: ModelConfig, tp: TPGroup, dtype: torch.dtype, device: torch.device | str) -> Model:
    """This rank's part of the model, on `device`, its parameters allocated but not initialised.

    Raises UnsupportedArchitecture, or ConfigError where the model cannot be split over `tp.size` ranks.
    """
    if cfg.architecture not in MODELS:
        raise UnsupportedArchitecture(cfg.architecture, sorted(MODELS))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return MODELS[cfg.architecture](cfg, tp).eval()
    finally:
        torch.set_default_dtype(before)
