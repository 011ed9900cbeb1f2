"""Kimi Linear, arXiv:2510.26692: Kimi Delta Attention in three of four layers, latent attention without positions in
the others, and DeepSeek V3's experts."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from engine.model.layers.latent_attention import LatentAttention
from engine.model.layers.recurrent.kimi_delta_attention import KIMI_DELTA_ATTENTION, KimiDeltaAttention
from engine.model.models.glm4_moe import Glm4MoeForCausalLM
from engine.model.models.hybrid.layer import HybridLayer


class KimiLinearLayer(HybridLayer):
    attention_type = LatentAttention
    recurrent_type = KimiDeltaAttention


class KimiLinearForCausalLM(Glm4MoeForCausalLM):
    packed: ClassVar[dict[str, str]] = Glm4MoeForCausalLM.packed | KIMI_DELTA_ATTENTION | {"recurrent": "self_attn"}
    layer_type: ClassVar[type[nn.Module]] = KimiLinearLayer

    def canonical_name(self, name: str) -> str | None:
        """Return the name in the published checkpoint. Adapters use transformers' names, with `forget_gate`."""
        return super().canonical_name(name.replace(".self_attn.forget_gate.", ".self_attn."))
