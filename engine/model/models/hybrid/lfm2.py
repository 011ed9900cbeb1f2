"""LFM2, arXiv:2511.23404, dense and with experts: short convolutions in most layers, Qwen 3's attention elsewhere."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from engine.model.layers.recurrent.short_conv import SHORT_CONV, ShortConv
from engine.model.models.hybrid.layer import HybridLayer
from engine.model.models.llama import PACKED, LlamaForCausalLM
from engine.model.models.qwen3 import Qwen3Attention


class Lfm2Layer(HybridLayer):
    recurrent_type = ShortConv
    attention_type = Qwen3Attention
    mlp_name = "feed_forward"


class Lfm2ForCausalLM(LlamaForCausalLM):
    packed: ClassVar[dict[str, str]] = PACKED | SHORT_CONV | {
        "recurrent": "conv", "mlp": "feed_forward", "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm", "q_norm": "q_layernorm", "k_norm": "k_layernorm", "o_proj": "out_proj",
        "gate_up_proj.gate": "w1", "gate_up_proj.up": "w3", "down_proj": "w2",
    }  # fmt: skip
    final_norm_name = "embedding_norm"
    layer_type: ClassVar[type[nn.Module]] = Lfm2Layer

    def checkpoint_name(self, path: str) -> str:
        return super().checkpoint_name(path).replace("gate.e_score_correction_bias", "expert_bias")
