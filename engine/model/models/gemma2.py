"""Gemma 2, arXiv:2408.00118: Gemma 3 without norms of queries and keys, and with capped logits. Capped attention scores
come from the configuration."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.model.config import ModelConfig
from engine.model.models.gemma3 import Gemma3ForCausalLM, Gemma3Layer
from engine.model.models.llama import LlamaAttention
from engine.model.shard import ShardPlan


class Gemma2Layer(Gemma3Layer):
    attention_type = LlamaAttention


class Gemma2ForCausalLM(Gemma3ForCausalLM):
    layer_type: ClassVar[type[nn.Module]] = Gemma2Layer

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__(cfg, tp)
        self.cap = cfg.final_logit_softcapping

    def logits(self, hidden: Tensor) -> Tensor:
        return self.capped(super().logits(hidden))

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = super().best(hidden)  # capping keeps the order of logits
        return self.capped(values), ids

    def capped(self, logits: Tensor) -> Tensor:
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)
