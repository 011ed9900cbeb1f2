"""Bamba: Llama with Mamba-2 in most layers, and half of each head rotated in the others."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from engine.model.layers.recurrent.mamba2 import MAMBA2, Mamba2
from engine.model.models.hybrid.layer import HybridLayer
from engine.model.models.llama import PACKED, LlamaForCausalLM

BAMBA = PACKED | MAMBA2 | {
    "recurrent": "mamba", "mlp": "feed_forward", "post_attention_layernorm": "pre_ff_layernorm",
}  # fmt: skip


class BambaLayer(HybridLayer):
    recurrent_type = Mamba2
    mlp_name = "feed_forward"


class BambaForCausalLM(LlamaForCausalLM):
    packed: ClassVar[dict[str, str]] = BAMBA
    final_norm_name = "final_layernorm"
    layer_type: ClassVar[type[nn.Module]] = BambaLayer
