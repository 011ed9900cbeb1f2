"""Reads the options of latent attention from config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.model.config_parts.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Options of multi-head latent attention: see layers/latent_attention.py."""

    q_rank: int | None
    """Size of the latent from which queries are projected; None if they are projected from the hidden state."""
    rank: int
    """Size of the latent from which keys and values are projected."""
    nope_dim: int
    """Number of values per query or key that are not rotated; `rope_dim` counts the rotated ones."""
    rope_dim: int
    value_dim: int
    interleaved: bool
    """Whether values that are rotated as a pair are neighbours; if not, they are half a head apart."""

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
    """Return the factor on attention scores. For latent attention, YaRN with `mscale_all_dim` raises it: DeepSeek V2,
    arXiv:2405.04434, section 3.1.4."""
    if latent is None:
        return raw.get("attention_multiplier") or float(raw.get("query_pre_attn_scalar") or head_dim) ** -0.5
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    weight, factor = rope.get("mscale_all_dim"), rope.get("factor", 1.0)
    raised = 0.1 * weight * math.log(factor) + 1.0 if weight and factor > 1 else 1.0
    return (latent.nope_dim + latent.rope_dim) ** -0.5 * raised**2
