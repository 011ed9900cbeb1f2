"""GLM 4.5, arXiv:2508.06471: Llama's attention, in some models with Qwen 3's norms, and DeepSeek V3's routing of
experts. Layers for multi-token prediction are not loaded."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.norm import RMSNorm
from engine.model.models.llama import PACKED, LlamaAttention, LlamaForCausalLM
from engine.model.models.moe import MoELayer
from engine.model.shard import ShardPlan


class Glm4MoeAttention(LlamaAttention):
    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__(cfg, tp, layer)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps) if cfg.qk_norm else None
        self.k_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps) if cfg.qk_norm else None

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv_proj(x)
        norms = self.q_norm.of_heads(self.k_norm) if self.q_norm is not None and self.k_norm is not None else None
        return self.o_proj(self.attend(q, k, v, batch, norms))


class Glm4MoeLayer(MoELayer):
    attention_type = Glm4MoeAttention


class Glm4MoeForCausalLM(LlamaForCausalLM):
    packed: ClassVar[dict[str, str]] = PACKED | {"mlp.shared_expert": "mlp.shared_experts"}
    layer_type: ClassVar[type[nn.Module]] = Glm4MoeLayer

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__(cfg, tp)
        last = cfg.num_layers + cfg.num_nextn_predict_layers
        self.unused = tuple(f"model.layers.{layer}." for layer in range(cfg.num_layers, last))
