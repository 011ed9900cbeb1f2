"""Reads the options of config.json that only encoders have."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.checkpoint.fields import Fields, Unsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Options that only BERT and its successors have."""

    layer_norm_eps: float
    norm_bias: bool
    type_vocab_size: int
    """Number of token types, each with an embedding: a pair's first text has type 0, its second type 1. 0 for none."""
    first_position: int
    """Row of the first token in the position embeddings; RoBERTa reserves earlier rows for padding."""
    classifier_bias: bool

    @classmethod
    def read(cls, raw: Fields) -> EncoderConfig:
        only = {"position_embedding_type": "absolute", "is_decoder": False, "classifier_activation": "gelu"}
        for key, value in only.items():
            if raw.get(key, value) != value:
                raise Unsupported(key, raw[key])
        return cls(
            layer_norm_eps=raw["layer_norm_eps"],
            norm_bias=raw.get("norm_bias", True),
            type_vocab_size=raw["type_vocab_size"],
            first_position=raw["first_position"] if "first_position" in raw else raw["pad_token_id"] + 1,
            classifier_bias=raw.get("classifier_bias", False),
        )


def encoder_names(raw: Fields) -> Fields:
    """Return ModernBERT's fields under the names that other families use. Every `global_attn_every_n_layers`-th layer
    sees all tokens; the others have a window."""
    if "local_attention" not in raw:
        return raw
    full = range(0, raw["num_hidden_layers"], raw["global_attn_every_n_layers"])
    types = ["full_attention" if i in full else "sliding_attention" for i in range(raw["num_hidden_layers"])]
    return (
        {"layer_types": types}
        | raw
        | {
            "sliding_window": raw["local_attention"],
            "rope_theta": raw["global_rope_theta"],
            "rope_local_base_freq": raw["local_rope_theta"],
            "layer_norm_eps": raw["norm_eps"],
            "norm_bias": raw.get("norm_bias", False),
            "type_vocab_size": 0,
            "first_position": 0,
        }
    )
