"""Qwen3-Next and Qwen 3.5, dense and with experts: three layers of Gated DeltaNet to each layer of attention, whose
heads are gated and partly rotated. Norms scale by 1 + weight."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.linear import QKVLinear
from engine.model.layers.recurrent.gated_delta_net import GatedDeltaNet, GroupedGatedDeltaNet
from engine.model.models.gemma3 import GemmaRMSNorm
from engine.model.models.hybrid.layer import HybridLayer
from engine.model.models.llama import PACKED, LlamaForCausalLM
from engine.model.models.qwen3 import Qwen3Attention
from engine.model.ops.elementwise import gates
from engine.model.shard import ShardPlan

GATED_DELTA_NET = {
    "in_proj.qkv_q": "in_proj_qkv", "in_proj.qkv_k": "in_proj_qkv", "in_proj.qkv_v": "in_proj_qkv",
    "in_proj.z": "in_proj_z", "in_proj.qkvz": "in_proj_qkvz",
    "gate_proj.b": "in_proj_b", "gate_proj.a": "in_proj_a", "gate_proj.ba": "in_proj_ba",
    "recurrent": "linear_attn",
}  # fmt: skip


class GatedQKVLinear(QKVLinear):
    query_parts = 2


class GatedAttention(Qwen3Attention):
    """Qwen 3's attention with each head's output scaled by a sigmoid gate."""

    norm_type = GemmaRMSNorm
    qkv_type = GatedQKVLinear

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__(cfg, tp, layer)
        self.open_gate = gates.select_open_gate(self.qkv_proj.dtype, self.qkv_proj.device)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv_proj(x)
        q, gate = q.unflatten(1, (-1, 2)).unbind(2)
        attended = self.attend(q, k, v, batch, self.q_norm.of_heads(self.k_norm))
        return self.o_proj(self.open_gate(attended, gate))


class Qwen3NextLayer(HybridLayer):
    norm_type = GemmaRMSNorm
    attention_type = GatedAttention
    recurrent_type: ClassVar[type[nn.Module]] = GroupedGatedDeltaNet


class Qwen3NextForCausalLM(LlamaForCausalLM):
    packed: ClassVar[dict[str, str]] = PACKED | GATED_DELTA_NET
    unused = ("mtp.",)
    layer_type: ClassVar[type[nn.Module]] = Qwen3NextLayer

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__(cfg, tp)
        self.norm = GemmaRMSNorm(cfg.hidden_size, cfg.rms_norm_eps)


class Qwen35Layer(Qwen3NextLayer):
    recurrent_type = GatedDeltaNet


class Qwen35ForCausalLM(Qwen3NextForCausalLM):
    layer_type = Qwen35Layer
