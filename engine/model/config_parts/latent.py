"""Reads the options of latent attention from config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.model.checkpoint.fields import Fields, Unsupported, one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """Options of the indexer that selects tokens: see layers/sparse_attention.py."""

    heads: int
    dim: int
    topk: int
    interleaved: bool
    """Like LatentConfig.interleaved, but for the indexer's own queries and keys."""
    layers: frozenset[int]
    """The layers with an indexer. The others use the selection of the last layer before them that has one."""

    @classmethod
    def read(cls, raw: Fields) -> IndexConfig | None:
        if not raw.get("index_topk"):
            return None
        if raw.get("q_lora_rank") is None:
            raise Unsupported("q_lora_rank", None)
        kinds = index_types(raw)
        if kinds[0] != "full":
            raise Unsupported("indexer_types", kinds)
        return cls(
            heads=raw["index_n_heads"],
            dim=raw["index_head_dim"],
            topk=raw["index_topk"],
            interleaved=raw["index_interleaved"],
            layers=frozenset(i for i, kind in enumerate(kinds) if kind == "full"),
        )


def index_types(raw: Fields) -> list[str]:
    """Return for each layer `full` or `shared`. For fields missing in config.json, transformers' defaults apply."""
    layers, pattern = raw["num_hidden_layers"], raw.get("indexer_types") or raw.get("index_topk_pattern")
    if pattern is None:
        step, offset = max(raw.get("index_topk_freq", 1), 1), raw.get("index_skip_topk_offset", 2)
        pattern = ["shared" if max(i - offset + 1, 0) % step else "full" for i in range(layers)]
    kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if len(kinds) != layers or set(kinds) - {"full", "shared"}:
        raise Unsupported("indexer_types", kinds)
    return kinds


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
    index: IndexConfig | None = None
    """The indexer; None if each token sees all before it."""

    @property
    def cached_dim(self) -> int:
        """Number of values that the cache holds for a token."""
        return self.rank + self.rope_dim + (0 if self.index is None else self.index.dim)

    @classmethod
    def read(cls, raw: Fields) -> LatentConfig | None:
        if not raw.get("kv_lora_rank"):
            return None
        one_of("attention_bias", raw.get("attention_bias"), (None, False))
        return cls(
            q_rank=raw["q_lora_rank"],
            rank=raw["kv_lora_rank"],
            nope_dim=raw["qk_nope_head_dim"],
            rope_dim=raw["qk_rope_head_dim"],
            value_dim=raw["v_head_dim"],
            interleaved=raw.get("rope_interleave", True),
            index=IndexConfig.read(raw),
        )


def latent_names(raw: Fields) -> Fields:
    """Return LongCat Flash's fields under the names that other families use. Each of its layers is two of ours, and the
    first of these has experts."""
    if "zero_expert_num" not in raw:
        return raw
    if not raw["zero_expert_num"]:
        raise Unsupported("zero_expert_num", raw["zero_expert_num"], "at least 1")
    for key, value in (("router_bias", False), ("zero_expert_type", "identity")):
        one_of(key, raw.get(key, value), (value,))
    for key in ("mla_scale_q_lora", "mla_scale_kv_lora"):
        one_of(key, raw.get(key, True), (True,))
    names = {
        "intermediate_size": "ffn_hidden_size",
        "moe_intermediate_size": "expert_ffn_hidden_size",
        "num_experts_per_tok": "moe_topk",
    }
    own = {}
    for name, other in names.items():  # transformers reads both names
        own[name] = raw[other] if other in raw else raw[name]
        if raw.get(name, own[name]) != own[name]:
            raise Unsupported(name, raw[name], f"{own[name]}, as {other}")
    if own["num_experts_per_tok"] > raw["n_routed_experts"]:
        limit = f"at most n_routed_experts ({raw['n_routed_experts']})"
        raise Unsupported("moe_topk", own["num_experts_per_tok"], limit)
    rotated = raw["qk_rope_head_dim"]
    sizes = {"qk_rope_head_dim": rotated, "qk_nope_head_dim + qk_rope_head_dim": raw["qk_nope_head_dim"] + rotated}
    for key, (limit, size) in zip(("head_dim", "qk_head_dim"), sizes.items(), strict=True):
        if raw.get(key) not in (None, size):
            raise Unsupported(key, raw[key], f"{limit} ({size})")
    layers = raw["num_layers"]
    return raw | own | {"num_hidden_layers": 2 * layers, "mlp_layer_types": ["sparse", "dense"] * layers}


def attention_scale(raw: Fields, latent: LatentConfig | None, head_dim: int) -> float:
    """Return the factor on attention scores. For latent attention, YaRN with `mscale_all_dim` raises it: DeepSeek V2,
    arXiv:2405.04434, section 3.1.4."""
    if latent is None:
        return raw.get("attention_multiplier") or float(raw.get("query_pre_attn_scalar") or head_dim) ** -0.5
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    weight, factor = rope.get("mscale_all_dim"), rope.get("factor", 1.0)
    raised = 0.1 * weight * math.log(factor) + 1.0 if weight and factor > 1 else 1.0
    return (latent.nope_dim + latent.rope_dim) ** -0.5 * raised**2
