"""Falcon-H1, arXiv:2507.22448: Mamba-2 and attention in parallel in every layer, and many factors."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.mlp import GatedMLP
from engine.model.layers.recurrent.mamba2 import Mamba2
from engine.model.models.hybrid.bamba import BAMBA
from engine.model.models.hybrid.layer import ScaledForCausalLM
from engine.model.models.llama import LlamaAttention, LlamaLayer
from engine.model.shard import ShardPlan


class FalconH1Attention(LlamaAttention):
    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__(cfg, tp, layer)
        self.multiplier = cfg.multipliers.key

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv_proj(x)
        return self.o_proj(self.attend(q, k * self.multiplier, v, batch))


class FalconH1MLP(GatedMLP):
    def __init__(self, cfg: ModelConfig, tp: ShardPlan, prefix: str):
        super().__init__(cfg, tp, prefix)
        self.gate, self.down = cfg.multipliers.gate, cfg.multipliers.down

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(x)
        gate_up[:, : gate_up.shape[1] // 2] *= self.gate
        return self.down_proj(self.activation(gate_up)) * self.down


class FalconH1Layer(LlamaLayer):
    attention_type = FalconH1Attention
    mlp_type = FalconH1MLP
    mlp_name = "feed_forward"

    def add_mixer(self, cfg: ModelConfig, tp: ShardPlan, layer: int) -> None:
        self.multipliers = cfg.multipliers
        self.recurrent = Mamba2(cfg, tp, layer, multipliers=cfg.multipliers.recurrent_parts)
        super().add_mixer(cfg, tp, layer)

    def mix(self, x: Tensor, batch: Batch) -> Tensor:
        m = self.multipliers
        mixed = self.recurrent(x * m.recurrent_in, batch) * m.recurrent_out
        return mixed + self.self_attn(x * m.attention_in, batch) * m.attention_out


class FalconH1ForCausalLM(ScaledForCausalLM):
    packed: ClassVar[dict[str, str]] = BAMBA
    final_norm_name = "final_layernorm"
    layer_type: ClassVar[type[nn.Module]] = FalconH1Layer
