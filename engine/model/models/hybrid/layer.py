"""Parts shared by families in which some layers are recurrent."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from engine.distributed.tp_group import TPGroup
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.mlp import GatedMLP
from engine.model.layers.moe import MixtureOfExperts
from engine.model.layers.norm import RMSNorm
from engine.model.models.llama import LlamaAttention, LlamaForCausalLM


class HybridLayer(nn.Module):
    """A pre-norm residual block like Llama's, with attention or a recurrent layer: (x, residual), each [tokens, hidden]
    -> (x, residual)."""

    norm_type: ClassVar[type[RMSNorm]] = RMSNorm
    attention_type: ClassVar[type[nn.Module]] = LlamaAttention
    recurrent_type: ClassVar[type[nn.Module]]
    mlp_name: ClassVar[str] = "mlp"
    """Name of the MLP in the checkpoint."""

    def __init__(self, cfg: ModelConfig, tp: TPGroup, layer: int):
        super().__init__()
        self.input_layernorm = self.norm_type(cfg.hidden_size, cfg.rms_norm_eps)
        self.recurrent: nn.Module | None = None
        self.self_attn: nn.Module | None = None
        if cfg.recurrent is not None and layer in cfg.recurrent.layers:
            self.recurrent = self.recurrent_type(cfg, tp, layer)
        else:
            self.self_attn = self.attention_type(cfg, tp, layer)
        self.post_attention_layernorm = self.norm_type(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = self.make_mlp(cfg, tp, layer)

    def make_mlp(self, cfg: ModelConfig, tp: TPGroup, layer: int) -> nn.Module:
        mlp_type = MixtureOfExperts if cfg.moe is not None and layer in cfg.moe.layers else GatedMLP
        return mlp_type(cfg, tp, f"layers.{layer}.{self.mlp_name}")

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        residual, normed = self.input_layernorm.add(residual, x)
        residual, normed = self.post_attention_layernorm.add(residual, self.mix(normed, batch))
        return self.mlp(normed), residual

    def mix(self, x: Tensor, batch: Batch) -> Tensor:
        """Apply attention or the recurrent layer: [tokens, hidden] -> [tokens, hidden]."""
        mixer = self.recurrent or self.self_attn
        assert mixer is not None
        return mixer(x, batch)


class ScaledForCausalLM(LlamaForCausalLM):
    """A causal language model with factors on embeddings and logits."""

    def __init__(self, cfg: ModelConfig, tp: TPGroup):
        super().__init__(cfg, tp)
        self.multipliers = cfg.multipliers

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * self.multipliers.embedding

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * self.multipliers.logits

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = super().best(hidden)
        return values * self.multipliers.logits, ids
