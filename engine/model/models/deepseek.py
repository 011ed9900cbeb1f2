"""DeepSeek V2 and V3, arXiv:2405.04434 and arXiv:2412.19437, Kimi K2, which is V3, and GLM 4.7 Flash: latent attention,
and routed experts beside shared ones. DeepSeek V3.2, arXiv:2512.02556, and GLM 5: the same with sparse attention.
MiniCPM 3, arXiv:2404.06395: latent attention without experts."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from engine.model.layers.latent_attention import LatentAttention
from engine.model.layers.sparse_attention import SparseLatentAttention
from engine.model.models.glm4_moe import Glm4MoeForCausalLM
from engine.model.models.hybrid.layer import ScaledForCausalLM, ScaledLayer
from engine.model.models.moe import MoELayer


class DeepseekLayer(MoELayer):
    attention_type = LatentAttention


class DeepseekForCausalLM(Glm4MoeForCausalLM):
    layer_type = DeepseekLayer


class SparseDeepseekLayer(DeepseekLayer):
    attention_type = SparseLatentAttention


class DeepseekV32ForCausalLM(DeepseekForCausalLM):
    layer_type = SparseDeepseekLayer


class MiniCPM3Layer(ScaledLayer, DeepseekLayer):
    pass


class MiniCPM3ForCausalLM(ScaledForCausalLM):
    layer_type: ClassVar[type[nn.Module]] = MiniCPM3Layer
