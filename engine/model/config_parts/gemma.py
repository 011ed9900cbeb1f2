"""Reads the options of config.json that Gemma 3n and Gemma 4 have and Gemma 3 lacks."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.checkpoint.fields import Fields, Unsupported
from engine.model.kv_groups import KVCacheSpec, LayerSpecs


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig:
    """Sizes and options of Gemma 3n's and Gemma 4's layers."""

    mlp_sizes: tuple[int, ...]
    layer_embedding_size: int
    """Size of a token's embedding for one layer; 0 if layers have no embeddings."""
    layer_vocab_size: int
    """Number of tokens with such embeddings; a token with a larger id gets those of token 0."""
    value_is_key: bool = False
    """Whether layers without a window use the key projection for values too."""
    sparsity: tuple[float, ...] = ()
    """For each layer, the fraction of the gate that is set to 0; empty if there is none."""
    streams: int = 1
    """Number of hidden states per token, of which each layer computes one (AltUp)."""
    active_stream: int = 0
    scale_active: bool = True
    laurel_rank: int = 0
    embedding_size: int = 0
    """Size of the vectors that a last projection gives; 0 if there is none."""

    @classmethod
    def read(cls, raw: Fields) -> GemmaConfig | None:
        """Return the options; None for another family. raw: fields as returned by `gemma_names`."""
        if "mlp_sizes" not in raw:
            return None
        layers, pattern = raw["num_hidden_layers"], raw.get("activation_sparsity_pattern")
        if pattern is None and "altup_num_inputs" in raw:
            pattern = [0.95] * 10 + [0.0] * (layers - 10) if layers > 10 else []
        return cls(
            mlp_sizes=raw["mlp_sizes"],
            layer_embedding_size=raw["hidden_size_per_layer_input"] or 0,
            layer_vocab_size=raw["vocab_size_per_layer_input"],
            value_is_key=bool(raw.get("attention_k_eq_v")),
            sparsity=tuple(pattern or ()) if any(pattern or ()) else (),
            streams=raw.get("altup_num_inputs", 1),
            active_stream=raw.get("altup_active_idx", 0),
            scale_active=raw.get("altup_correct_scale", True),
            laurel_rank=raw.get("laurel_rank", 0),
            embedding_size=raw.get("embedding_dim", 0),
        )


def gemma_names(raw: Fields) -> Fields:
    """Return the fields of Gemma 3n and 4 under the names that other families use."""
    if "num_kv_shared_layers" not in raw:
        return raw
    layers, size = raw["num_hidden_layers"], raw["intermediate_size"]
    sizes = list(size) if isinstance(size, list | tuple) else [size] * layers
    if len(sizes) != layers:
        raise Unsupported("intermediate_size", size)
    if raw.get("use_double_wide_mlp"):
        first = layers - raw["num_kv_shared_layers"]
        sizes = [size if i < first else 2 * size for i, size in enumerate(sizes)]
    own = {"mlp_sizes": tuple(sizes), "intermediate_size": max(sizes)}
    if raw.get("use_bidirectional_attention") == "vision":  # for tokens of images only: see VisionConfig
        own["use_bidirectional_attention"] = None
    pattern = raw["sliding_window_pattern"]
    types = raw.get("layer_types") or [
        "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)
    ]
    if "global_head_dim" in raw:  # Gemma 4
        types = [*types[:-1], "full_attention"]
        own |= {"num_experts": raw.get("num_experts") if raw.get("enable_moe_block") else 0}
        own |= {"num_experts_per_tok": raw.get("top_k_experts")}
    if "embedding_dim" in raw:  # EmbeddingGemma 2, whose window is a radius, where others have its diameter
        own |= {"sliding_window": 2 * raw["sliding_window"], "attention_k_eq_v": False}
        wide = {"head_dim": raw["global_head_dim"], "num_key_value_heads": raw["num_global_key_value_heads"]}
        each = {str(i): wide for i, kind in enumerate(types) if kind == "full_attention"}
        own |= {"per_layer_config": raw.get("per_layer_config") or each}
    return raw | own | {"layer_types": types}


def gemma_specs(raw: Fields, windows: tuple[int | None, ...]) -> LayerSpecs:
    """Return what each layer keeps; empty for another family. Each of the last `num_kv_shared_layers` layers reads the
    KV of the last earlier layer with the same window. The others keep their own, whose sizes may differ."""
    if "mlp_sizes" not in raw:
        return ()
    first, specs = len(windows) - raw["num_kv_shared_layers"], list[KVCacheSpec | int | None]()
    for layer, window in enumerate(windows):
        owners = [i for i in range(first) if windows[i] == window]
        if layer < first:
            heads, head_dim = layer_sizes(raw, layer, window)
            specs.append(KVCacheSpec(num_kv_heads=heads, head_dim=head_dim, window=window))
        elif owners:
            specs.append(owners[-1])
        else:
            raise Unsupported("num_kv_shared_layers", raw["num_kv_shared_layers"])
    return tuple(specs)


def layer_sizes(raw: Fields, layer: int, window: int | None) -> tuple[int, int]:
    """Return a layer's number of KV heads and their size. A config.json written by transformers lists each layer that
    differs; one from Google has common sizes for all layers without a window."""
    heads, head_dim = raw["num_key_value_heads"], raw["head_dim"]
    if own := raw.get("per_layer_config"):
        sizes = own.get(str(layer), {})
        if not isinstance(sizes, dict):
            raise Unsupported(f"per_layer_config.{layer}", sizes, "an object")
        if other := sizes.keys() - {"num_key_value_heads", "head_dim"}:
            raise Unsupported("per_layer_config", sorted(other))
        return sizes.get("num_key_value_heads", heads), sizes.get("head_dim", head_dim)
    if window is not None or "global_head_dim" not in raw:
        return heads, head_dim
    shared = raw.get("attention_k_eq_v") and raw.get("num_global_key_value_heads")
    return shared or heads, raw["global_head_dim"]
