"""Adapters that PEFT itself writes, with random weights, and what transformers answers with them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.lora.adapter_files import open_adapter
from engine.wire.parts.adapter import ModelAdapter

ATTENTION = r".*\.layers\.\d+\.self_attn\.(q|k|v|o|qkv|q_a|q_b|kv_a|kv_b)_proj(_with_mqa)?"


def load(folder: Path, auto: Any = transformers.AutoModelForCausalLM) -> transformers.PreTrainedModel:
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id = None  # so that every generation is as long as asked for
    return model


def make_adapter(
    target: Path, model: Path, seed: int, rank: int = 4, auto: Any = transformers.AutoModelForCausalLM, **config: Any
) -> ModelAdapter:
    """Write an adapter for a model, and return what names it. Its weights are such that every token feels it.

    auto: transformers' class that loads the model.
    """
    import peft  # takes a second, which only a process that runs such tests spends

    config = {"r": rank, "lora_alpha": 2 * rank, "target_modules": ATTENTION, "init_lora_weights": False} | config
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(load(model, auto), peft.LoraConfig(**config))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * (0.5 / parameter.shape[1] ** 0.5))
    adapted.save_pretrained(target)
    return ModelAdapter(target.name, str(target), open_adapter(target).digest)


def with_adapter(model: transformers.PreTrainedModel, path: str) -> Any:
    """The model with an adapter beside its weights, computed by PEFT."""
    import peft

    return peft.PeftModel.from_pretrained(model, path)


class Reference:
    """transformers' greedy answers, by PEFT: with the adapter merged into the weights, or beside them."""

    def __init__(self, model: Path, max_tokens: int):
        self._folder, self._max_tokens = model, max_tokens
        self._model = cache(self._make)

    def _make(self, path: str | None, merged: bool) -> Any:
        model = load(self._folder)
        if path is None:
            return model
        adapted = with_adapter(model, path)
        return adapted.merge_and_unload() if merged else adapted

    def tokens(self, prompt: list[int], lora: ModelAdapter | None, merged: bool = True) -> list[int]:
        ids = torch.tensor([prompt])
        model = self._model(None if lora is None else lora.path, merged)
        found = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=self._max_tokens, do_sample=False
        )
        return found[0, len(prompt) :].tolist()
