"""Latent attention, read from config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.model.config_parts.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention: see layers/latent_attention.py."""

    q_rank: int | None
    """Size of the latent that queries are made of; None if they are made of the token."""
    rank: int
    """Size of the latent that keys and values are made of."""
    nope_dim: int
    """Size of the part of a head's query and key that is not rotated."""
    rope_dim: int
    value_dim: int
    interleaved: bool
    """Whether pairs that are rotated together are neighbours, instead of halves."""

    @classmethod
    def read(cls, raw: Fields) -> LatentConfig | None:
        if not raw.get("kv_lora_rank"):
            return None
        return cls(
            q_rank=raw["q_lora_rank"],
            rank=raw["kv_lora_rank"],
            nope_dim=raw["qk_nope_head_dim"],
            rope_dim=raw["qk_rope_head_dim"],
            value_dim=raw["v_head_dim"],
            interleaved=raw.get("rope_interleave", True),
        )


def attention_scale(raw: Fields, latent: LatentConfig | None, head_dim: int) -> float:
    """The factor on scores. YaRN with `mscale_all_dim` raises that of latent attention: DeepSeek V2, arXiv:2405.04434,
    section 3.1.4."""
    if latent is None:
        return raw.get("attention_multiplier") or float(raw.get("query_pre_attn_scalar") or head_dim) ** -0.5
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    weight, factor = rope.get("mscale_all_dim"), rope.get("factor", 1.0)
    raised = 0.1 * weight * math.log(factor) + 1.0 if weight and factor > 1 else 1.0
    return (latent.nope_dim + latent.rope_dim) ** -0.5 * raised**2
