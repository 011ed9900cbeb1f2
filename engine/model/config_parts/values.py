"""Reads the attention of models whose values are smaller than their keys, and whose windows have more KV heads."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.checkpoint.fields import Fields, Unsupported, one_of
from engine.model.kv_groups import KVCacheSpec, LayerSpecs


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueConfig:
    """Size and factor of values."""

    dim: int
    """Size of a head's value. In the KV cache, zeros make it as large as a key."""
    scale: float

    @classmethod
    def read(cls, raw: Fields) -> ValueConfig | None:
        """Return the options; None for another family."""
        if "attention_value_scale" not in raw:
            return None
        dim, scale = raw["v_head_dim"], raw["attention_value_scale"]
        if dim > raw["head_dim"]:
            raise Unsupported("v_head_dim", dim, f"at most head_dim ({raw['head_dim']})")
        return cls(dim=dim, scale=1.0 if scale is None else scale)


def value_names(raw: Fields) -> Fields:
    """Return MiMo V2 Flash's fields under the names that other families use. For fields missing in config.json,
    transformers' defaults apply."""
    if "attention_value_scale" not in raw:
        return raw
    layers, heads = raw["num_hidden_layers"], raw["num_key_value_heads"]
    only = {
        "swa_head_dim": raw["head_dim"], "swa_v_head_dim": raw["v_head_dim"],
        "swa_num_attention_heads": raw["num_attention_heads"], "swa_num_key_value_heads": 2 * heads,
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    }  # fmt: skip
    for key, value in only.items():
        one_of(key, raw.get(key, value), (value,))
    if raw["num_attention_heads"] % (2 * heads):
        limit = f"a divisor of half of the {raw['num_attention_heads']} attention heads"
        raise Unsupported("num_key_value_heads", heads, limit)
    own = {
        "layer_types": raw.get("layer_types") or _types(raw.get("hybrid_layer_pattern"), layers),
        "rms_norm_eps": raw.get("layernorm_epsilon", raw["rms_norm_eps"]),
        "mlp_layer_types": raw.get("mlp_layer_types") or ["sparse" if i else "dense" for i in range(layers)],
        "rope_parameters": raw.get("rope_parameters") or {
            "full_attention": {"rope_theta": raw["rope_theta"]},
            "sliding_attention": {"rope_theta": raw["swa_rope_theta"]},
        },
    }  # fmt: skip
    if frequencies := raw.get("moe_layer_freq"):
        own["mlp_layer_types"] = ["sparse" if one_of("moe_layer_freq", f, (0, 1)) else "dense" for f in frequencies]
    if size := raw.get("sliding_window_size"):  # tokens before the one that sees them
        own["sliding_window"] = size + 1
    return raw | own


def _types(pattern: list[int] | None, layers: int) -> list[str]:
    """Return the layers' types. pattern: 1 for each layer with a window, else 0."""
    if pattern is None:
        pattern = [int(i > 0 and (i + 1) % 6 > 0) for i in range(layers)]
    return ["sliding_attention" if one_of("hybrid_layer_pattern", p, (0, 1)) else "full_attention" for p in pattern]


def value_specs(raw: Fields, windows: tuple[int | None, ...]) -> LayerSpecs:
    """Return what each layer keeps; empty for another family. Layers with a window have twice as many KV heads."""
    if "attention_value_scale" not in raw:
        return ()
    heads, head_dim = raw["num_key_value_heads"], raw["head_dim"]
    return tuple(
        KVCacheSpec(num_kv_heads=heads if window is None else 2 * heads, head_dim=head_dim, window=window)
        for window in windows
    )
