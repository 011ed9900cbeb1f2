"""Parts shared by families with recurrent layers, or with factors on parts of the model."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.models.llama import LlamaForCausalLM, LlamaLayer
from engine.model.models.moe import MoELayer
from engine.model.ops.elementwise import gates
from engine.model.shard import ShardPlan


class HybridLayer(MoELayer):
    """A layer of Llama with a recurrent layer in place of attention, in the layers that the configuration names."""

    recurrent_type: ClassVar[type[nn.Module]]

    def add_mixer(self, cfg: ModelConfig, tp: ShardPlan, layer: int) -> None:
        self.is_recurrent = cfg.recurrent is not None and layer in cfg.recurrent.layers
        if self.is_recurrent:
            self.recurrent = self.recurrent_type(cfg, tp, layer)
        else:
            super().add_mixer(cfg, tp, layer)

    def mix(self, x: Tensor, batch: Batch) -> Tensor:
        return self.recurrent(x, batch) if self.is_recurrent else super().mix(x, batch)


class ScaledLayer(LlamaLayer):
    """A layer whose outputs are scaled before they are added to the residual."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__(cfg, tp, layer)
        self.multiplier, norm = cfg.multipliers.residual, self.input_layernorm
        self.scaled = gates.select_scaled(norm.dtype, norm.device)

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor | None]:
        x, residual = super().forward(x, residual, batch)
        return self.scaled(x, self.multiplier, x.dtype), residual

    def mix(self, x: Tensor, batch: Batch) -> Tensor:
        return self.scaled(super().mix(x, batch), self.multiplier, x.dtype)


class ScaledForCausalLM(LlamaForCausalLM):
    """A causal language model with factors on embeddings and logits."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__(cfg, tp)
        self.multipliers = cfg.multipliers

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * self.multipliers.embedding

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * self.multipliers.logits

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = super().best(hidden)
        return values * self.multipliers.logits, ids
