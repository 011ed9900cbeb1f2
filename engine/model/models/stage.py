"""A pipeline stage's part of a model (model/stage.py)."""

from __future__ import annotations

from torch import nn

from engine.model.config import ModelConfig
from engine.model.layers.embedding import VocabEmbedding
from engine.model.layers.other_stage import NoEmbedding, OtherLayer, StageOutput
from engine.model.models.llama import LlamaForCausalLM
from engine.model.shard import ShardPlan


class StageModel(LlamaForCausalLM):
    """Put before a family's class: the model with the parts of this stage."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__(cfg, tp)
        self.stage = cfg.stage
        if not cfg.stage.is_last:
            self.norm = StageOutput(cfg.hidden_size)

    def make_embedding(self, cfg: ModelConfig, tp: ShardPlan) -> VocabEmbedding:
        return super().make_embedding(cfg, tp) if cfg.stage.has_embedding else NoEmbedding(cfg.hidden_size)

    def make_layer(self, cfg: ModelConfig, tp: ShardPlan, layer: int) -> nn.Module:
        return super().make_layer(cfg, tp, layer) if layer in cfg.stage.layers else OtherLayer()

    def canonical_name(self, name: str) -> str | None:
        own = super().canonical_name(name)
        return own if own is not None and self.stage.holds(own) else None
