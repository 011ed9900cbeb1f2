"""The model families: the class of each architecture in config.json, and what its config.json may leave unsaid.

Imports torch only to build a model, so that reading a configuration stays fast.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.errors import UnsupportedArchitecture

if TYPE_CHECKING:
    import torch

    from engine.distributed.tp_group import TPGroup
    from engine.model.config import ModelConfig
    from engine.model.models.llama import Model


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture."""

    model: str
    """Its class, as `file.Class` in this folder."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Fields that its config.json may leave out: transformers' defaults, or part of the family's code."""


LLAMA = "llama.LlamaForCausalLM"
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(LLAMA),
    # Mistral, arXiv:2310.06825: Llama with a sliding attention window
    "MistralForCausalLM": Family(LLAMA, {"sliding_window": 4096}),
    # Qwen 2 and 2.5, arXiv:2407.10671: Llama with biases on Q, K and V
    "Qwen2ForCausalLM": Family(LLAMA, {"use_sliding_window": False, "max_window_layers": 28, "qkv_bias": True}),
    "Qwen3ForCausalLM": Family(
        "qwen3.Qwen3ForCausalLM", {"use_sliding_window": False, "max_window_layers": 28, "head_dim": 128}
    ),
    # Qwen 3 with a mixture of experts in most layers or all
    "Qwen3MoeForCausalLM": Family("qwen3.Qwen3ForCausalLM", {"use_sliding_window": False}),
    "Gemma3ForCausalLM": Family(
        "gemma3.Gemma3ForCausalLM",
        {
            "tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
}  # fmt: skip


def find_family(architecture: str) -> Family:
    """Look up an architecture. Raises UnsupportedArchitecture."""
    if architecture not in FAMILIES:
        raise UnsupportedArchitecture(architecture, sorted(FAMILIES))
    return FAMILIES[architecture]


def model_class(architecture: str) -> type[Model]:
    """Every family's class has the interface of Llama's. Raises UnsupportedArchitecture."""
    file, _, name = find_family(architecture).model.partition(".")
    cls: type[Model] = getattr(importlib.import_module(f"engine.model.models.{file}"), name)
    return cls


def build_model(cfg: ModelConfig, tp: TPGroup, dtype: torch.dtype, device: torch.device | str) -> Model:
    """Build this rank's shard of the model on `device`, with parameters allocated but not initialised.

    Raises UnsupportedArchitecture, or ConfigError where the model cannot be split over `tp.size` ranks.
    """
    import torch

    cls, before = model_class(cfg.architecture), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return cls(cfg, tp).eval()
    finally:
        torch.set_default_dtype(before)
