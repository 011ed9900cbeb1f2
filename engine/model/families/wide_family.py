"""Families that have more than Llama: experts, latent attention, recurrent layers, Gemma's layers, or encoders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from engine.model.checkpoint.fields import Fields, Unsupported
from engine.model.config_parts.encoder import EncoderConfig, encoder_names
from engine.model.config_parts.gemma import GemmaConfig, gemma_names, gemma_specs
from engine.model.config_parts.latent import LatentConfig, attention_scale, latent_names
from engine.model.config_parts.moe import MoEConfig
from engine.model.config_parts.multipliers import Multipliers
from engine.model.config_parts.recurrent import RecurrentConfig, block_types, recurrent_names
from engine.model.config_parts.values import ValueConfig, value_names, value_specs
from engine.model.families.family import OPTIONAL, Family

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class WideFamily(Family):
    """A family that reads more fields than Llama does."""

    optional: ClassVar[frozenset[str]] = OPTIONAL | {
        *NUM_EXPERTS, "shared_expert_intermediate_size", "n_shared_experts", "first_k_dense_replace",
        "num_nextn_predict_layers", "swiglu_limit", "swiglu_alpha", "router_bias", "scoring", "recurrent",
        "full_attention_interval", "attention_multiplier", "query_pre_attn_scalar", "use_qk_norm",
        "use_bidirectional_attention",
        # names that only the code gives to fields
        "mlp_sizes", "shared_gate", "shared_name", "first_position", "index_interleaved", "linear_head_dim",
        "linear_num_heads",
    }  # fmt: skip

    encoder: bool = False
    """Whether its tokens see each other in both directions; it then has no head that generates."""

    def fields(self, raw: Fields) -> Fields:
        """Return the fields that this family reads. Raises KeyError if a mixture of experts has no `num_experts`."""
        counts = [key for key in NUM_EXPERTS if key in self.keys]
        if counts and (self.defaults | raw).get("enable_moe_block", True) and all(raw.get(k) is None for k in counts):
            raise KeyError(counts[0])
        fields = Family.fields(self, raw)
        fields = gemma_names(fields)
        if fields.get("use_bidirectional_attention") not in (None, False, True):
            raise Unsupported("use_bidirectional_attention", fields["use_bidirectional_attention"])
        fields = value_names(latent_names(recurrent_names(fields)))
        return encoder_names(fields) if self.encoder else fields

    def shape(self, raw: Fields, max_model_len: int | None) -> dict[str, Any]:
        encoder = EncoderConfig.read(raw) if self.encoder else None
        bidirectional = self.encoder or bool(raw.get("use_bidirectional_attention"))
        if bidirectional and raw.get("sliding_window"):
            raw = raw | {"sliding_window": raw["sliding_window"] // 2 + 1}  # config.json counts both sides
        cfg = Family.shape(self, raw, max_model_len)
        latent, num_layers = LatentConfig.read(raw), cfg["num_layers"]
        if latent is not None:
            cfg |= {"latent": latent, "head_dim": latent.cached_dim, "num_kv_heads": 1}
        if encoder is not None:
            cfg |= {"encoder": encoder}
            cfg["max_position_embeddings"] -= encoder.first_position
        return cfg | {
            "attention_scale": attention_scale(raw, latent, cfg["head_dim"]),
            "moe": MoEConfig.read(raw, num_layers),
            "recurrent": RecurrentConfig.read(raw, num_layers),
            "block_types": block_types(raw, num_layers) if "recurrent" in raw else (),
            "multipliers": Multipliers.read(raw),
            "gemma": GemmaConfig.read(raw),
            "values": ValueConfig.read(raw),
            "layer_kv": gemma_specs(raw, cfg["window"]) or value_specs(raw, cfg["window"]),
            "attn_logit_softcapping": raw.get("attn_logit_softcapping"),
            "final_logit_softcapping": raw.get("final_logit_softcapping"),
            "qk_norm": bool(raw.get("use_qk_norm")),
            "num_nextn_predict_layers": raw.get("num_nextn_predict_layers") or raw.get("mtp_num_hidden_layers") or 0,
            "bidirectional": bidirectional,
            "head": "none" if bidirectional else "lm",
        }
