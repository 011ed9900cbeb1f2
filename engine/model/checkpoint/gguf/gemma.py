"""Gemma's fields in config.json: windows, and what Gemma 3n and Gemma 4 have besides."""

from __future__ import annotations

import math
from statistics import NormalDist

from engine.model.checkpoint.gguf.keys import Fields, GGUFError, Keys
from engine.model.checkpoint.gguf.source import GGUFSource

LARGEST_GEMMAS = {("gemma2", 46), ("gemma3", 62)}  # 27B, by layers: they scale queries by hidden_size / heads
UNROTATED = 1e30  # the factor of wavelengths that are not rotated


def query_scale(source: GGUFSource) -> Fields:
    keys = source.keys
    per_head = keys.size("embedding_length") // keys.size("attention.head_count")
    largest = (keys.prefix, keys.size("block_count")) in LARGEST_GEMMAS
    return {"query_pre_attn_scalar": per_head if largest else keys.size("attention.key_length", per_head)}


def gemma2(source: GGUFSource) -> Fields:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return query_scale(source) | {name: source.keys.get(name) for name in caps}


def gemma3(source: GGUFSource) -> Fields:
    return query_scale(source) | _local_base(source.keys)


def gemma3n(source: GGUFSource) -> Fields:
    keys = source.keys
    scales = keys.per_layer("activation_sparsity_scale", 0.0)
    if not all(isinstance(scale, int | float) and not math.isnan(scale) for scale in scales):
        raise GGUFError(f"{keys.prefix}.activation_sparsity_scale must be a list of numbers")
    return _local_base(keys) | _per_layer(source) | {
        "activation_sparsity_pattern": [NormalDist().cdf(scale) for scale in scales],
        "altup_num_inputs": keys.size("altup.num_inputs"),
        "altup_active_idx": keys.size("altup.active_idx", 0),
        "laurel_rank": source.shape("laurel_l.weight")[0],
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }  # fmt: skip


def gemma4(source: GGUFSource) -> Fields:
    keys = source.keys
    windows = keys.per_layer("attention.sliding_window_pattern")
    heads = keys.sizes("attention.head_count_kv")
    whole = [i for i, local in enumerate(windows) if not local]
    local_heads = {heads[i] for i, local in enumerate(windows) if local} or {heads[0]}
    whole_heads = {heads[i] for i in whole} or local_heads
    if len(local_heads) > 1 or len(whole_heads) > 1:
        raise GGUFError(f"{keys.prefix}.attention.head_count_kv = {heads} must differ by windows only")
    owned = {part for part in ("attn_k", "attn_v") for i in whole if f"blk.{i}.{part}.weight" in source.tensors}
    keys_are_values = owned == {"attn_k"}
    fields: Fields = _per_layer(source) | {
        "num_attention_heads": keys.size("attention.head_count"),
        "num_key_value_heads": local_heads.pop(),
        "head_dim": keys.size("attention.key_length_swa"),
        "global_head_dim": keys.size("attention.key_length"),
        **({"attention_k_eq_v": True, "num_global_key_value_heads": whole_heads.pop()} if keys_are_values else {}),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)},
            "full_attention": {
                "rope_type": "proportional", "rope_theta": keys.number("rope.freq_base"),
                "partial_rotary_factor": _rotated(source),
            },
        },
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
    }  # fmt: skip
    if (rotated := keys.size("rope.dimension_count_swa", fields["head_dim"])) != fields["head_dim"]:
        raise GGUFError(f"{keys.prefix}.rope.dimension_count_swa = {rotated} must be {fields['head_dim']}")
    if not keys.size("expert_count", 0):
        return fields
    return fields | {
        "enable_moe_block": True, "num_experts": keys.size("expert_count"),
        "top_k_experts": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
    }  # fmt: skip


def _local_base(keys: Keys) -> Fields:
    return {"rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0)}


def _per_layer(source: GGUFSource) -> Fields:
    """Return the fields that Gemma 3n and 4 share: layers that read the KV of others, MLPs that differ, and embeddings
    of tokens for layers."""
    keys, embeddings = source.keys, source.tensors.get("per_layer_token_embd.weight")
    return {
        "num_kv_shared_layers": keys.size("attention.shared_kv_layers", 0),
        "intermediate_size": keys.sizes("feed_forward_length"),
        "hidden_size_per_layer_input": keys.size("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": source.tensors["token_embd.weight"].shape[0] if embeddings is None
        else embeddings.shape[0],
    }  # fmt: skip


def _rotated(source: GGUFSource) -> float:
    """Return the fraction of wavelengths that layers without a window rotate: those whose factor is 1."""
    factors = source.factors.get("rope_freqs.weight", [1.0])
    rotated = sum(factor == 1.0 for factor in factors)
    ordered = factors[:rotated] == [1.0] * rotated
    if not rotated or not ordered or any(factor < UNROTATED / 2 for factor in factors[rotated:]):
        raise GGUFError(f"rope_freqs.weight = {str(factors)[:100]} is not supported: must be 1 at first, then 1e30")
    return rotated / len(factors)
