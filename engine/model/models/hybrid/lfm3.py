"""LFM3: LFM2's short convolutions, attention with a window in some layers and a gate for each head, and norms before
and after each block."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.linear import PaddedLinear
from engine.model.layers.norm import RMSNorm
from engine.model.layers.recurrent.gated_delta_net import head_shard
from engine.model.layers.recurrent.short_conv import SHORT_CONV
from engine.model.models.hybrid.lfm2 import Lfm2Layer
from engine.model.models.llama import PACKED, LlamaForCausalLM
from engine.model.models.qwen3 import Qwen3Attention
from engine.model.ops.elementwise import gates
from engine.model.shard import ShardPlan


class Lfm3Attention(Qwen3Attention):
    """Qwen 3's attention with each head's output scaled by a sigmoid gate, one number per token."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__(cfg, tp, layer)
        self.gate_proj = PaddedLinear(cfg.hidden_size, {"": head_shard(cfg.num_heads, 1, tp)})
        self.head_dim = cfg.head_dim
        self.open_gate = gates.select_open_gate(self.qkv_proj.dtype, self.qkv_proj.device)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv_proj(x)
        attended = self.attend(q, k, v, batch, self.q_norm.of_heads(self.k_norm))
        return self.o_proj(self.open_gate(attended, self.gate_proj(x)[..., None].expand(-1, -1, self.head_dim)))


class Lfm3Layer(Lfm2Layer):
    """A layer of LFM2 that norms what its two blocks add to the residual."""

    attention_type = Lfm3Attention

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__(cfg, tp, layer)
        self.post_operator_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_ffn_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor | None]:
        x, residual = super().forward(x, residual, batch)
        return self.post_ffn_norm(x), residual

    def mix(self, x: Tensor, batch: Batch) -> Tensor:
        return self.post_operator_norm(super().mix(x, batch))


class Lfm3ForCausalLM(LlamaForCausalLM):
    packed: ClassVar[dict[str, str]] = PACKED | SHORT_CONV | {
        "recurrent": "conv", "mlp": "feed_forward", "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm", "gate_up_proj.gate": "w1", "gate_up_proj.up": "w3", "down_proj": "w2",
    }  # fmt: skip
    final_norm_name = "embedding_norm"
    layer_type: ClassVar[type[nn.Module]] = Lfm3Layer
