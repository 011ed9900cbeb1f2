"""Reads the config.json of a model that transformers' own code computes.

Imported only for such a model, since importing transformers takes seconds.
"""

from __future__ import annotations

import json
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.errors import UnsupportedArchitecture
from engine.model.checkpoint.fields import Unsupported
from engine.model.checkpoint.folder import as_token_ids
from engine.model.checkpoint.kinds import COUNT, LAYERS, SIZE

Fields = dict[str, Any]
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
# Fields of a configuration that the paged KV cache does not support, with the reason.
REFUSED = {
    "index_topk": "its attention is sparse, with an indexer",
    "kv_lora_rank": "its attention keeps latent vectors (MLA), but the KV cache holds only whole heads",
    "num_kv_shared_layers": "some of its layers read the KV of others",
    "global_head_dim": "the heads of its layers differ in size",
}
LARGEST = {"layers": LAYERS, "n_layer": LAYERS, "experts": COUNT, "heads": COUNT}  # by a part of a field's name
RECURRENT = "linear_conv_kernel_dim", "mamba_d_conv"


def read(raw: Fields, max_model_len: int | None) -> Fields:
    """Return the fields of ModelConfig that transformers can read from the contents of config.json.

    max_model_len: the longest sequence; None for the model's context. If a model has `longrope` and max_model_len
    exceeds its original context, the long factors apply to all sequences. Raises UnsupportedArchitecture, or KeyError
    for a missing field.
    """
    architecture = (raw.get("architectures") or ["none"])[0]
    _check_numbers(raw)
    try:
        return _read(raw, architecture, max_model_len)
    except (StrictDataclassError, RuntimeError, ValueError, TypeError, AttributeError) as e:
        why = str(e).strip().splitlines()
        reason = f"transformers does not understand its config.json: {why[-1].strip() if why else type(e).__name__}"
        raise UnsupportedArchitecture(architecture, reason) from e


def _check_numbers(raw: Fields, path: str = "") -> None:
    """Raise Unsupported for numbers that no model has, as transformers makes lists as long as they say."""
    for key, value in raw.items():
        if isinstance(value, dict):
            _check_numbers(value, f"{path}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            most = next((most for part, most in LARGEST.items() if part in key), SIZE)
            if not -SIZE <= value <= most:
                raise Unsupported(path + key, value, f"a number up to {most:,}")


def _read(raw: Fields, architecture: str, max_model_len: int | None) -> Fields:
    config, tied = read_config(raw, architecture)
    if raw.get("is_encoder_decoder"):
        raise UnsupportedArchitecture(architecture, "it is an encoder with a decoder")
    for field, reason in REFUSED.items():
        if getattr(config, field, None):
            raise UnsupportedArchitecture(architecture, reason)
    types, num_heads = getattr(config, "layer_types", None) or [], getattr(config, "num_attention_heads", None)
    only_attention = num_heads and types and ATTENTION.issuperset(types)  # possible in a hybrid family
    if not num_heads or (any(getattr(config, field, None) for field in RECURRENT) and not only_attention):
        reason = "some or all of its layers keep a recurrent state of a kind that is not supported"
        raise UnsupportedArchitecture(architecture, reason)
    num_layers = _get(config, "num_hidden_layers")
    if other := sorted(set(types) - ATTENTION):
        raise UnsupportedArchitecture(architecture, f"it has layers of the type {', '.join(other)}")
    window = getattr(config, "sliding_window", None)
    sliding = types or [""] * num_layers
    context = _get(config, "max_position_embeddings")
    return {
        "architecture": architecture,
        "vocab_size": _get(config, "vocab_size"),
        "hidden_size": _get(config, "hidden_size"),
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or num_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        "activation": str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "")),
        "max_position_embeddings": context,
        "window": tuple(window if kind == "sliding_attention" else None for kind in sliding),
        "tie_word_embeddings": tied,
        "eos_token_ids": as_token_ids(getattr(config, "eos_token_id", None)),
        "transformers": json.dumps(_fixed_rope(raw, config, max_model_len or context), sort_keys=True),
    }


def read_config(raw: Fields, architecture: str) -> tuple[Any, bool]:
    """Return transformers' configuration of the language model, and whether its head is tied.

    Raises UnsupportedArchitecture.
    """
    kind = raw.get("model_type")
    if kind not in CONFIG_MAPPING:
        reason = f"transformers {transformers.__version__} does not know its model_type {kind!r}"
        if raw.get("auto_map"):
            reason += ", and code from a model's folder is never run (trust_remote_code)"
        raise UnsupportedArchitecture(architecture, reason)
    whole = CONFIG_MAPPING[kind].from_dict(raw)
    config = whole.get_text_config(decoder=True)
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedArchitecture(
            architecture, f"transformers has no causal language model for its model_type {config.model_type!r}"
        )
    return config, bool(getattr(whole, "tie_word_embeddings", False))


def _get(config: Any, field: str) -> int:
    value = getattr(config, field, None)
    if value is None:
        raise KeyError(field)
    return int(value)


def _fixed_rope(raw: Fields, config: Any, longest: int) -> Fields:
    """Return `raw`, with the long factors of `longrope` in place of the short ones if sequences may exceed the original
    context. transformers would switch as a sequence grows, but cached keys are already rotated."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope" or longest <= rope["original_max_position_embeddings"]:
        return raw
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    return {**raw, key: {**raw[key], "short_factor": rope["long_factor"]}}
