"""Makes the config.json of a model from the metadata of its GGUF file. A value that would change the output and cannot
be expressed in config.json is refused, never ignored."""

from __future__ import annotations

from engine.model.checkpoint.gguf.entry import PLAIN, Entry
from engine.model.checkpoint.gguf.families import LAYER_NORM, RMS_NORM, GGUFFamily, family
from engine.model.checkpoint.gguf.keys import Fields, GGUFError, head_counts, num_layers
from engine.model.checkpoint.gguf.rope import rope_fields
from engine.model.checkpoint.gguf.source import GGUFSource

# Keys that change what a model computes, and that only few families here support.
REFUSED = (
    "attention.clamp_kqv", "attention.max_alibi_bias", "attention.kv_lora_rank", "attention.scale",
    "attention.shared_kv_layers", "attention.temperature_scale", "embedding_scale", "residual_scale", "logit_scale",
    "full_attention_interval", "rope.scaling.yarn_log_multiplier", "router_logit_softcapping",
)  # fmt: skip
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def config(source: GGUFSource) -> Fields:
    """Return the fields of config.json. Raises GGUFError."""
    keys, own, tensors = source.keys, family(source.metadata), source.tensors
    for name in REFUSED:
        if keys.get(name) and name not in own.numbers.values() and name not in own.reads:
            raise GGUFError(f"{keys.prefix}.{name} = {keys.get(name)!r} is not supported")
    if keys.get("attention.causal") is False:
        raise GGUFError(f"{keys.prefix}.attention.causal = False is not supported: it is an encoder")
    if "token_embd.weight" not in tensors:
        raise GGUFError("it has no token_embd.weight")
    window = keys.size("attention.sliding_window", 0) or None
    fields = {
        "architectures": [own.architecture],
        "model_type": own.model_type,
        "dtype": _dtype(tensors),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": keys.size("embedding_length"),
        "num_hidden_layers": num_layers(source.metadata),
        "hidden_act": "silu",
        **({} if LAYER_NORM in own.numbers.values() else {"rms_norm_eps": keys.number(RMS_NORM)}),
        "max_position_embeddings": keys.size("context_length"),
        **({} if own.own_ropes else rope_fields(source, own.yarn)),
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length"),
        **({"attention_bias": True} if "attn_q.bias" in source.parts else {}),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": source.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": source.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": source.metadata.get("tokenizer.ggml.padding_token_id"),
        "sliding_window": window,
    }
    local = source.metadata.get(f"{keys.prefix}.attention.sliding_window_pattern")
    if window and isinstance(local, list):
        fields["layer_types"] = ["sliding_attention" if here else "full_attention" for here in local]
    if not isinstance(keys.metadata.get(f"{keys.prefix}.feed_forward_length"), list):
        fields["intermediate_size"] = keys.size("feed_forward_length", 0) or keys.size("expert_feed_forward_length")
    if not own.own_heads:
        fields |= _heads(source, own)
    for read in own.more:
        fields |= read(source)
    fields |= {name: keys.number(key) for name, key in own.numbers.items() if keys.get(key) is not None}
    fields |= own.fields
    return {name: value for name, value in fields.items() if value is not None or name not in own.fields}


def _heads(source: GGUFSource, own: GGUFFamily) -> Fields:
    keys, counts = source.keys, head_counts(source.metadata)
    head_dim = keys.size("attention.key_length", keys.size("embedding_length") // counts["q_proj"])
    if (value_length := keys.size("attention.value_length", head_dim)) != head_dim:
        raise GGUFError(f"{keys.prefix}.attention.value_length = {value_length} differs from the length of keys")
    rotated = keys.size("rope.dimension_count", head_dim)
    if rotated != head_dim and not own.partial_rotary:
        raise GGUFError(f"{keys.prefix}.rope.dimension_count = {rotated} is not supported: must be {head_dim}")
    return {
        "num_attention_heads": counts["q_proj"],
        "num_key_value_heads": counts["k_proj"],
        "head_dim": head_dim,
        **({"partial_rotary_factor": rotated / head_dim} if rotated != head_dim else {}),
    }


def _dtype(tensors: dict[str, Entry]) -> str:
    """Return the dtype that most of the file's matrices have, by bytes; bfloat16 if they are stored in blocks."""
    sizes: dict[str, int] = {}
    for entry in tensors.values():
        if len(entry.shape) > 1:
            sizes[entry.type] = sizes.get(entry.type, 0) + entry.nbytes
    most = max(sizes, key=sizes.__getitem__)
    return DTYPES[most] if most in PLAIN else "bfloat16"
