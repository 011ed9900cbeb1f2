"""DeepSeek V2 and V3, arXiv:2405.04434 and arXiv:2412.19437, Kimi K2, which is V3, and GLM 4.7 Flash: latent attention,
and routed experts beside shared ones. DeepSeek V3.2, arXiv:2512.02556, and GLM 5: the same with sparse attention.
MiniCPM 3, arXiv:2404.06395: latent attention without experts."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from engine.distributed.tp_group import TPGroup
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.latent_attention import LatentAttention
from engine.model.layers.mlp import GatedMLP
from engine.model.layers.moe import MixtureOfExperts
from engine.model.layers.norm import RMSNorm
from engine.model.layers.sparse_attention import SparseLatentAttention
from engine.model.models.glm4_moe import Glm4MoeForCausalLM
from engine.model.models.hybrid.layer import ScaledForCausalLM
from engine.model.ops import activation


class DeepseekLayer(nn.Module):
    """A pre-norm residual block like Llama's: (x, residual), each [tokens, hidden] -> (x, residual)."""

    attention_type: ClassVar[type[LatentAttention]] = LatentAttention

    def __init__(self, cfg: ModelConfig, tp: TPGroup, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = self.attention_type(cfg, tp, layer)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        mlp_type = MixtureOfExperts if cfg.moe is not None and layer in cfg.moe.layers else GatedMLP
        self.mlp = mlp_type(cfg, tp, f"layers.{layer}.mlp")
        self.multiplier = cfg.multipliers.residual
        self.scale = activation.select_scaled(self.input_layernorm.dtype, self.input_layernorm.device)

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        residual, normed = self.input_layernorm.add(residual, x)
        residual, normed = self.post_attention_layernorm.add(residual, self.scaled(self.self_attn(normed, batch)))
        return self.scaled(self.mlp(normed)), residual

    def scaled(self, x: Tensor) -> Tensor:
        return x if self.multiplier == 1.0 else self.scale(x, self.multiplier, x.dtype)


class DeepseekForCausalLM(Glm4MoeForCausalLM):
    layer_type = DeepseekLayer


class SparseDeepseekLayer(DeepseekLayer):
    attention_type = SparseLatentAttention


class DeepseekV32ForCausalLM(DeepseekForCausalLM):
    layer_type = SparseDeepseekLayer


class MiniCPM3ForCausalLM(ScaledForCausalLM):
    layer_type: ClassVar[type[nn.Module]] = DeepseekLayer
