"""Model families: which class computes an architecture, and which fields of config.json matter to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, Literal

from engine.model.checkpoint.fields import Fields, Unsupported, one_of
from engine.model.checkpoint.folder import as_token_ids
from engine.model.config_parts.rope import check_factors, max_positions, read_ropes

Head = Literal["lm", "score", "token_score", "none"]
"""What a model computes from its hidden states: next tokens, scores of a text or of each token, or nothing."""
HEADS: dict[str, Head] = {
    "LMHeadModel": "lm", "ForSequenceClassification": "score", "ForTokenClassification": "token_score",
    "ForMaskedLM": "none", "TextModel": "none", "Model": "none",
}  # fmt: skip
"""By the end of an architecture's name; `lm` for all others."""
TABLES = ("llama_like", "experts", "gemma", "latent", "hybrid")
"""Files beside this one that have FAMILIES too."""
OTHERS = ".other_architectures"
"""The file whose `family_of` computes any other architecture, or refuses it."""
# Fields of config.json that some families read and others ignore.
OPTIONAL = frozenset({
    "attention_bias", "mlp_bias", "qkv_bias", "output_bias", "hidden_activation", "partial_rotary_factor",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern",
    "rope_local_base_freq",
})  # fmt: skip
# Fields that change the output if they are set, and that only few families support.
RARE = ("attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True, slots=True)
class Family:
    """Llama, and what differs from it by the fields of ModelConfig alone."""

    optional: ClassVar[frozenset[str]] = OPTIONAL

    model: str
    """The class that computes it, as `file.Class` in models/."""
    keys: tuple[str, ...] = ()
    """The fields in `optional` that transformers' code of this family reads."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Values for fields that a config.json may lack: transformers' defaults, or constants of the family's code."""
    activations: tuple[str, ...] = ("silu", "gelu_pytorch_tanh")
    """The activations that its MLPs support."""

    def text_part(self, architecture: str, whole: Fields) -> tuple[str, Fields]:
        """Return the architecture and the fields of a model's text part. A text model is its own text part.

        whole: the contents of config.json."""
        return architecture, whole

    def read(self, architecture: str, raw: Fields, max_model_len: int | None) -> dict[str, Any]:
        """Return fields of ModelConfig. raw: fields of the text part. max_model_len: the longest sequence, on which the
        frequencies of `longrope` depend; None for the model's context.

        Raises UnsupportedArchitecture, Unsupported, or KeyError for a missing field.
        """
        cfg = self.shape(self.fields(raw), max_model_len)
        check_sizes(cfg)
        return cfg | {"architecture": architecture}

    def fields(self, raw: Fields) -> Fields:
        """Return the fields that this family reads, under the names that `shape` reads."""
        fields = self.defaults | raw.pick(lambda key: key not in self.optional or key in self.keys)
        for key in RARE:
            if fields.get(key) and key not in self.keys:
                raise Unsupported(key, fields[key])
        return fields

    def shape(self, raw: Fields, max_model_len: int | None) -> dict[str, Any]:
        """Return fields of ModelConfig. raw: from `fields`."""
        num_layers, num_heads = raw["num_hidden_layers"], raw["num_attention_heads"]
        head_dim = raw.get("head_dim") or raw["hidden_size"] // num_heads
        window = read_windows(raw, num_layers)
        ropes = read_ropes(raw, window, max_model_len or raw["max_position_embeddings"])
        attention_bias = bool(raw.get("attention_bias"))
        return {
            "vocab_size": raw["vocab_size"],
            "hidden_size": raw["hidden_size"],
            "intermediate_size": raw["intermediate_size"],
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": raw.get("num_key_value_heads") or num_heads,
            "head_dim": head_dim,
            "attention_scale": max(1, head_dim) ** -0.5,
            "activation": one_of("hidden_act", raw.get("hidden_activation") or raw["hidden_act"], self.activations),
            "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
            "max_position_embeddings": max_positions(raw["max_position_embeddings"], ropes),
            "rope": ropes,
            "window": window,
            "qkv_bias": raw.get("qkv_bias", attention_bias),
            "output_bias": raw.get("output_bias", attention_bias),
            "mlp_bias": bool(raw.get("mlp_bias")),
            "tie_word_embeddings": bool(raw.get("tie_word_embeddings")),
            "eos_token_ids": as_token_ids(raw.get("eos_token_id")),
        }


def check_sizes(cfg: dict[str, Any]) -> None:
    """Raise Unsupported for sizes that no model has together."""
    num_heads, num_kv_heads = cfg["num_heads"], cfg["num_kv_heads"]
    if cfg["head_dim"] < 1:
        raise Unsupported("num_attention_heads", num_heads, f"at most hidden_size ({cfg['hidden_size']})")
    if num_heads % num_kv_heads:
        raise Unsupported("num_key_value_heads", num_kv_heads, f"a divisor of the {num_heads} attention heads")
    for types in (cfg["window"], cfg.get("block_types")):
        if types and len(types) < cfg["num_layers"]:
            limit = f"a list of {cfg['num_layers']}, one for each layer"
            raise Unsupported("layer_types", list(types), limit)
    check_factors(cfg["rope"], cfg["head_dim"])


def read_windows(raw: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer. Families state it per layer, by a pattern (Gemma 3: every sixth layer is
    global), from some layer on (Qwen), or for all layers (Mistral, Qwen 3 MoE); Llama has none."""
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    if window is None:
        return (None,) * num_layers
    if types := raw.get("layer_types"):
        allowed = ("full_attention", "sliding_attention")
        sliding = [one_of("layer_types", t, allowed) == "sliding_attention" for t in types]
    elif pattern := raw.get("sliding_window_pattern"):
        sliding = [(i + 1) % pattern != 0 for i in range(num_layers)]
    else:
        sliding = [i >= raw.get("max_window_layers", 0) for i in range(num_layers)]
    return tuple(window if s else None for s in sliding)


QWEN_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

FAMILIES = {
    # Llama 2 and 3: arXiv:2307.09288, arXiv:2407.21783
    "LlamaForCausalLM": Family("llama.LlamaForCausalLM", ("attention_bias", "mlp_bias"), {"eos_token_id": 2}),
    # Qwen 3, arXiv:2505.09388: Llama with norms on queries and keys
    "Qwen3ForCausalLM": Family(
        "qwen3.Qwen3ForCausalLM",
        (*QWEN_WINDOW, "attention_bias"),
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    ),
}  # fmt: skip
"""Families by the architecture that config.json names."""


@cache
def families() -> dict[str, Family]:
    """Return the families of generative models that have code here, by architecture."""
    found = dict(FAMILIES)
    for table in TABLES:
        found |= import_module(f".{table}", __package__).FAMILIES
    return found


def find_family(architecture: str) -> Family:
    """Return the family of an architecture. Raises UnsupportedArchitecture."""
    family = families().get(architecture)
    if family is None:
        family = import_module(OTHERS, __package__).family_of(architecture)
    return family
