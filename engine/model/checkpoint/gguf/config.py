"""Makes the config.json of a model from the metadata of its GGUF file. A value that would change the output and cannot
be expressed in config.json is refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.model.checkpoint.gguf.entry import PLAIN, Entry

Metadata = Mapping[str, Any]
Fields = dict[str, Any]
# Keys that change what a model computes, and that no family here supports.
REFUSED = (
    "attention.clamp_kqv", "attention.max_alibi_bias", "attention.kv_lora_rank", "attention.scale",
    "attention.shared_kv_layers", "embedding_scale", "residual_scale", "logit_scale", "full_attention_interval",
    "rope.scaling.yarn_log_multiplier", "router_logit_softcapping",
)  # fmt: skip
SIGMOID = 2  # a value of `expert_gating_func`
COUNT = range(1, 1 << 16)
MAX_LAYERS = 1 << 12
# The range of each whole number that is read, by its name behind the architecture's. Others are positive sizes.
RANGES = {
    "block_count": range(1, MAX_LAYERS), "attention.head_count": COUNT, "attention.head_count_kv": COUNT,
    **dict.fromkeys(
        ("attention.sliding_window", "nextn_predict_layers", "expert_count", "expert_used_count", "expert_gating_func",
         "expert_shared_count", "expert_group_count", "expert_group_used_count", "leading_dense_block_count",
         "expert_feed_forward_length", "expert_shared_feed_forward_length", "feed_forward_length"), range(1 << 24)
    ),
}  # fmt: skip
SIZE = range(1, 1 << 28)
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
LARGEST_GEMMAS = {("gemma2", 46), ("gemma3", 62)}  # 27B, by layers: they scale queries by hidden_size / heads


class GGUFError(Exception):
    """The GGUF file cannot be read as a model; the message says why."""


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """How a Hugging Face checkpoint names an architecture of llama.cpp, and how its tensors differ."""

    architecture: str
    model_type: str
    fields: Fields = field(default_factory=dict)
    """Fields of config.json that are the same for all its models."""
    numbers: dict[str, str] = field(default_factory=dict)
    """Further fields of config.json -> the file's keys; a field is left out if the file has no such key."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Parts of tensor names in most checkpoints -> the names in this family's."""
    rotated_pairs: bool = False
    """Whether llama.cpp stores the rows of query and key weights in pairs (Entry.pairs_of_heads)."""
    norm_shift: float = 0.0
    """Number that llama.cpp adds to the weights of norms."""
    partial_rotary: bool = False
    """Whether heads may be partly rotated."""
    alternating_experts: bool = False
    """Whether checkpoints store the experts of a layer in one tensor, with alternating rows of gate and up."""


GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": None}
RMS_NORM = "attention.layer_norm_rms_epsilon"
LAYER_NORM = "attention.layer_norm_epsilon"
GRANITE = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
LINEAR = {
    "linear_conv_kernel_dim": "ssm.conv_kernel", "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
}  # fmt: skip
QWEN35: dict[str, Any] = {
    "numbers": LINEAR, "renamed": {"self_attn.qkv_proj.": "linear_attn.in_proj_qkv."}, "norm_shift": 1.0,
    "partial_rotary": True,
}  # fmt: skip
MAMBA = {
    "mamba_d_conv": "ssm.conv_kernel", "mamba_d_state": "ssm.state_size", "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
}  # fmt: skip
GRANITE_HYBRID_NAMES = {
    "linear_attn.": "mamba.",
    "mlp.shared_expert.gate_proj.": "shared_mlp.input_linear.first_part.",
    "mlp.shared_expert.up_proj.": "shared_mlp.input_linear.second_part.",
    "mlp.shared_expert.down_proj.": "shared_mlp.output_linear.",
    "mlp.experts.gate_proj.": "block_sparse_moe.input_linear.first_part.",
    "mlp.experts.up_proj.": "block_sparse_moe.input_linear.second_part.",
    "mlp.experts.down_proj.": "block_sparse_moe.output_linear.", "mlp.gate.": "block_sparse_moe.router.layer.",
    "mlp.gate_proj.": "shared_mlp.input_linear.first_part.", "mlp.up_proj.": "shared_mlp.input_linear.second_part.",
    "mlp.down_proj.": "shared_mlp.output_linear.",
}  # fmt: skip
LFM2_FIELDS = {"block_auto_adjust_ff_dim": False, "rms_norm_eps": None}
LFM2_NUMBERS = {"norm_eps": RMS_NORM, "conv_L_cache": "shortconv.l_cache"}
LFM2_NAMES = {
    "mlp.gate.e_score_correction.": "feed_forward.expert_bias.", "mlp.experts.gate_proj.": "feed_forward.experts.w1.",
    "mlp.experts.up_proj.": "feed_forward.experts.w3.", "mlp.experts.down_proj.": "feed_forward.experts.w2.",
    "mlp.gate_proj.": "feed_forward.w1.", "mlp.up_proj.": "feed_forward.w3.", "mlp.down_proj.": "feed_forward.w2.",
    "mlp.gate.": "feed_forward.gate.", "input_layernorm.": "operator_norm.", "post_attention_layernorm.": "ffn_norm.",
    "self_attn.o_proj.": "self_attn.out_proj.", "q_norm.": "q_layernorm.", "k_norm.": "k_layernorm.",
}  # fmt: skip
BIASED = {"attention_bias": None}  # always
FAMILIES = {
    "llama": GGUFFamily("LlamaForCausalLM", "llama", rotated_pairs=True),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", "qwen2", BIASED),
    "qwen2moe": GGUFFamily("Qwen2MoeForCausalLM", "qwen2_moe", {"norm_topk_prob": False} | BIASED),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": GGUFFamily("Qwen3MoeForCausalLM", "qwen3_moe", {"norm_topk_prob": True}),
    "gemma2": GGUFFamily("Gemma2ForCausalLM", "gemma2", GEMMA, norm_shift=1.0),
    "gemma3": GGUFFamily("Gemma3ForCausalLM", "gemma3_text", GEMMA, norm_shift=1.0),
    "phi3": GGUFFamily(
        "Phi3ForCausalLM", "phi3", renamed={"mlp.up_proj.": "mlp.gate_up_proj."}, partial_rotary=True
    ),
    "granite": GGUFFamily("GraniteForCausalLM", "granite", numbers=GRANITE, rotated_pairs=True),
    "smollm3": GGUFFamily("SmolLM3ForCausalLM", "smollm3", rotated_pairs=True),
    "olmo2": GGUFFamily("Olmo2ForCausalLM", "olmo2"),
    "exaone4": GGUFFamily("Exaone4ForCausalLM", "exaone4"),
    "ernie4_5": GGUFFamily("Ernie4_5ForCausalLM", "ernie4_5"),
    "seed_oss": GGUFFamily("SeedOssForCausalLM", "seed_oss", {"attention_bias": True, "attention_out_bias": False}),
    "hunyuan-dense": GGUFFamily(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense",
        renamed={"q_norm.": "query_layernorm.", "k_norm.": "key_layernorm."},
    ),
    "gemma": GGUFFamily("GemmaForCausalLM", "gemma", {"hidden_act": "gelu_pytorch_tanh"}, norm_shift=1.0),
    "arcee": GGUFFamily("ArceeForCausalLM", "arcee", {"hidden_act": "relu2"}, rotated_pairs=True),
    "cohere2": GGUFFamily(
        "Cohere2ForCausalLM", "cohere2", numbers={"layer_norm_eps": LAYER_NORM, "logit_scale": "logit_scale"}
    ),
    "starcoder2": GGUFFamily(
        "Starcoder2ForCausalLM", "starcoder2", {"hidden_act": "gelu_pytorch_tanh"}, {"norm_epsilon": LAYER_NORM},
        {"mlp.up_proj.": "mlp.c_fc.", "mlp.down_proj.": "mlp.c_proj."},
    ),
    "qwen35": GGUFFamily("Qwen3_5ForCausalLM", "qwen3_5_text", **QWEN35),
    "qwen35moe": GGUFFamily("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", **QWEN35),
    "granitehybrid": GGUFFamily(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", numbers=GRANITE | MAMBA, renamed=GRANITE_HYBRID_NAMES,
        rotated_pairs=True,
    ),
    "lfm2": GGUFFamily("Lfm2ForCausalLM", "lfm2", LFM2_FIELDS, LFM2_NUMBERS, LFM2_NAMES),
    "lfm2moe": GGUFFamily("Lfm2MoeForCausalLM", "lfm2_moe", LFM2_FIELDS, LFM2_NUMBERS, LFM2_NAMES),
    "glm4": GGUFFamily(
        "Glm4ForCausalLM", "glm4", partial_rotary=True,
        renamed={"mlp.up_proj.": "mlp.gate_up_proj.", "post_feedforward_layernorm.": "post_mlp_layernorm."},
    ),
    "glm4moe": GGUFFamily(
        "Glm4MoeForCausalLM", "glm4_moe", renamed={"shared_expert.": "shared_experts."}, partial_rotary=True
    ),
    "gpt-oss": GGUFFamily(
        "GptOssForCausalLM", "gpt_oss", renamed={"mlp.gate.": "mlp.router."}, alternating_experts=True
    ),
}  # fmt: skip
MIXTRAL = GGUFFamily("MixtralForCausalLM", "mixtral", rotated_pairs=True)
OLMO3 = GGUFFamily("Olmo3ForCausalLM", "olmo3")


def family(metadata: Metadata) -> GGUFFamily:
    """Return the family of a file. Raises GGUFError for an unknown architecture."""
    name = metadata.get("general.architecture")
    if name not in FAMILIES:
        raise GGUFError(f"general.architecture = {name!r} is not supported: must be one of {', '.join(FAMILIES)}")
    if name == "llama" and metadata.get("llama.expert_count"):
        return MIXTRAL
    return OLMO3 if name == "olmo2" and metadata.get("olmo2.attention.sliding_window") else FAMILIES[name]


class Keys:
    """The metadata under the prefix of the file's architecture."""

    def __init__(self, metadata: Metadata):
        self.metadata, self.prefix = metadata, metadata["general.architecture"]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self.prefix}.{name}", default)
        if isinstance(value, list):  # one for each layer, 0 if the layer has no such part
            values = set(value) - {0} if len(value) > 1 else set(value)
            if len(values) != 1:
                shown = str(value[:50])[:100]
                raise GGUFError(f"{self.prefix}.{name} = {shown} is not supported: must be the same for all layers")
            return values.pop()
        return value

    def __getitem__(self, name: str) -> Any:
        if (value := self.get(name)) is None:
            raise GGUFError(f"it has no {self.prefix}.{name}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """Return a whole number in its range. Raises GGUFError, also for a missing one without a default."""
        value = self[name] if default is None else self.get(name, default)
        allowed = RANGES.get(name, SIZE)
        if not isinstance(value, int) or isinstance(value, bool) or value not in allowed:
            limit = f"a whole number from {allowed[0]:,} to {allowed[-1]:,}"
            raise GGUFError(f"{self.prefix}.{name} = {str(value)[:100]} is not supported: must be {limit}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number. Raises GGUFError, also for a missing one without a default."""
        value = self[name] if default is None else self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise GGUFError(f"{self.prefix}.{name} = {str(value)[:100]} is not supported: must be above 0, and finite")
        return value


def num_layers(metadata: Metadata) -> int:
    """Return the number of layers, not counting layers for multi-token prediction."""
    keys = Keys(metadata)
    count, further = keys.size("block_count"), keys.size("nextn_predict_layers", 0)
    if further >= count:
        raise GGUFError(f"{keys.prefix}.nextn_predict_layers = {further} is not supported: must be below {count}")
    return count - further


def head_counts(metadata: Metadata) -> dict[str, int]:
    """Return the numbers of heads of the projections whose rows some families store in pairs."""
    keys = Keys(metadata)
    heads = keys.size("attention.head_count")
    return {"q_proj": heads, "k_proj": keys.size("attention.head_count_kv", heads)}


@dataclass(frozen=True, slots=True)
class LinearHeads:
    """The heads of linear attention; none of them where a model has none."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int


def linear_heads(metadata: Metadata) -> LinearHeads:
    keys = Keys(metadata)
    key_heads, value_heads = keys.size("ssm.group_count", 1), keys.size("ssm.time_step_rank", 1)
    if value_heads % key_heads:
        raise GGUFError(f"{keys.prefix}.ssm.time_step_rank = {value_heads} must be a multiple of {key_heads} key heads")
    return LinearHeads(
        key_heads, value_heads, keys.size("ssm.state_size", 1), keys.size("ssm.inner_size", value_heads) // value_heads
    )


def config(metadata: Metadata, tensors: dict[str, Entry], factors: dict[str, list[float]]) -> Fields:
    """Return the fields of config.json. Raises GGUFError. tensors: by their names in the file. factors: the file's
    tensors of rotary factors, by name."""
    keys, own = Keys(metadata), family(metadata)
    for name in REFUSED:
        if keys.get(name) and name not in own.numbers.values():
            raise GGUFError(f"{keys.prefix}.{name} = {keys.get(name)!r} is not supported")
    if keys.get("attention.causal") is False:
        raise GGUFError(f"{keys.prefix}.attention.causal = False is not supported: it is an encoder")
    if "token_embd.weight" not in tensors:
        raise GGUFError("it has no token_embd.weight")
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    head_dim = keys.size("attention.key_length", hidden // heads)
    if (value_length := keys.size("attention.value_length", head_dim)) != head_dim:
        raise GGUFError(f"{keys.prefix}.attention.value_length = {value_length} differs from the length of keys")
    rotated = keys.size("rope.dimension_count", head_dim)
    if rotated != head_dim and not own.partial_rotary:
        raise GGUFError(f"{keys.prefix}.rope.dimension_count = {rotated} is not supported: must be {head_dim}")
    parts = {name.partition(".")[2].partition(".")[2] for name in tensors if name.startswith("blk.")}
    return {
        "architectures": [own.architecture],
        "model_type": own.model_type,
        "dtype": _dtype(tensors),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.size("feed_forward_length", 0) or keys.size("expert_feed_forward_length"),
        "num_hidden_layers": num_layers(metadata),
        "num_attention_heads": heads,
        "num_key_value_heads": head_counts(metadata)["k_proj"],
        "head_dim": head_dim,
        "hidden_act": "silu",
        **({} if LAYER_NORM in own.numbers.values() else {"rms_norm_eps": keys.number(RMS_NORM)}),
        "max_position_embeddings": keys.size("context_length"),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(keys, factors),
        **({"partial_rotary_factor": rotated / head_dim} if rotated != head_dim else {}),
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length"),
        **({"attention_bias": True} if "attn_q.bias" in parts else {}),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        **_windows(keys, hidden // heads, head_dim),
        **_recurrent(keys),
        **_experts(keys, tensors, parts),
        **{name: keys.number(key) for name, key in own.numbers.items() if keys.get(key) is not None},
        **own.fields,
    }  # fmt: skip


def _dtype(tensors: dict[str, Entry]) -> str:
    """Return the dtype that most of the file's matrices have, by bytes; bfloat16 if they are stored in blocks."""
    sizes: dict[str, int] = {}
    for entry in tensors.values():
        if len(entry.shape) > 1:
            sizes[entry.type] = sizes.get(entry.type, 0) + entry.nbytes
    most = max(sizes, key=sizes.__getitem__)
    return DTYPES[most] if most in PLAIN else "bfloat16"


def _rope_scaling(keys: Keys, factors: dict[str, list[float]]) -> Fields | None:
    """Return the rotary scaling. Rotary factors in the file are read as factors of `longrope`, even if they were
    computed by Llama 3's rule."""
    context = keys.size("context_length")
    original = keys.size("rope.scaling.original_context_length", context)
    if own := factors.get("rope_freqs.weight"):
        return {
            "rope_type": "longrope", "short_factor": own, "long_factor": own, "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }  # fmt: skip
    if long := factors.get("rope_factors_long.weight"):
        scaling = {
            "rope_type": "longrope", "short_factor": factors["rope_factors_short.weight"], "long_factor": long,
            "original_max_position_embeddings": original,
        }  # fmt: skip
        factor = keys.get("rope.scaling.attn_factor")
        return scaling if factor is None else scaling | {"attention_factor": factor}
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise GGUFError(f"{keys.prefix}.rope.scaling.type = {kind!r} is not supported: must be none, linear or yarn")
    scaling = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling |= {"original_max_position_embeddings": original, "truncate": keys.prefix != "gpt-oss"}
        for name in ("beta_fast", "beta_slow"):
            if (value := keys.get(f"rope.scaling.yarn_{name}")) is not None:
                scaling[name] = value
    return scaling


def _windows(keys: Keys, per_head: int, head_dim: int) -> Fields:
    fields: Fields = {"sliding_window": keys.size("attention.sliding_window", 0) or None}
    local = keys.metadata.get(f"{keys.prefix}.attention.sliding_window_pattern")
    if fields["sliding_window"] and isinstance(local, list):
        fields["layer_types"] = ["sliding_attention" if here else "full_attention" for here in local]
    if keys.prefix not in ("gemma2", "gemma3"):
        return fields
    largest = (keys.prefix, keys.size("block_count")) in LARGEST_GEMMAS
    fields["query_pre_attn_scalar"] = per_head if largest else head_dim
    if keys.prefix == "gemma2":
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        return fields | {name: keys.get(name) for name in caps}
    return fields | {"rope_local_base_freq": keys.get("rope.freq_base_swa", 10_000.0)}


def _recurrent(keys: Keys) -> Fields:
    """Return the size of linear attention's value heads; or which layers have attention, and which a recurrent layer
    instead, as those without KV heads."""
    if keys.prefix in ("qwen35", "qwen35moe"):
        return {"linear_value_head_dim": linear_heads(keys.metadata).value_size}
    if keys.prefix not in (kinds := {"lfm2": "conv", "lfm2moe": "conv", "granitehybrid": "linear_attention"}):
        return {}
    counts = keys.metadata.get(f"{keys.prefix}.attention.head_count_kv")
    counts = counts if isinstance(counts, list) else [counts] * keys.size("block_count")
    fields: Fields = {"layer_types": ["full_attention" if count else kinds[keys.prefix] for count in counts]}
    if keys.prefix != "granitehybrid":
        return fields
    inner, heads = keys.size("ssm.inner_size"), keys.size("ssm.time_step_rank")
    return fields | {
        "mamba_expand": inner // keys.size("embedding_length"), "mamba_d_head": inner // heads,
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned") else None,
        "num_local_experts": keys.size("expert_count", 0), "num_experts_per_tok": keys.size("expert_used_count", 0),
        "shared_intermediate_size": keys.size(
            "expert_shared_feed_forward_length", keys.size("feed_forward_length")
        ),
    }  # fmt: skip


def _experts(keys: Keys, tensors: dict[str, Entry], parts: set[str]) -> Fields:
    count = keys.size("expert_count", 0)
    if not count or keys.prefix == "granitehybrid":
        return {}
    layers, used = range(keys.size("block_count")), keys.size("expert_used_count")
    size = keys.size("expert_feed_forward_length", 0) or keys.size("feed_forward_length")
    if keys.prefix in ("glm4moe", "lfm2moe") and keys.get("expert_gating_func", SIGMOID) != SIGMOID:
        raise GGUFError(f"{keys.prefix}.expert_gating_func = {keys['expert_gating_func']} is not supported")
    fields = {
        "num_experts_per_tok": used,
        "moe_intermediate_size": size,
        "mlp_only_layers": [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in tensors],
    }
    match keys.prefix:
        case "llama":
            return {"num_local_experts": count, "num_experts_per_tok": used}
        case "gpt-oss":
            return {**fields, "num_local_experts": count, "intermediate_size": size}
        case "qwen2moe" | "qwen35moe":
            shared = keys.size("expert_shared_feed_forward_length", 0)
            return {**fields, "num_experts": count, "shared_expert_intermediate_size": shared}
        case "lfm2moe":
            dense = keys.size("leading_dense_block_count", 0)
            return {
                "num_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": size,
                "num_dense_layers": dense,
            }  # fmt: skip
        case "glm4moe":
            return {
                "n_routed_experts": count,
                "num_experts_per_tok": used,
                "moe_intermediate_size": size,
                "n_shared_experts": keys.size("expert_shared_count", 1),
                "first_k_dense_replace": keys.size("leading_dense_block_count", 0),
                "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
                "norm_topk_prob": keys.get("expert_weights_norm", True),
                "n_group": keys.size("expert_group_count", 1),
                "topk_group": keys.size("expert_group_used_count", 1),
                "use_qk_norm": "attn_q_norm.weight" in parts,
                "num_nextn_predict_layers": keys.size("nextn_predict_layers", 0),
            }
        case _:
            return {**fields, "num_experts": count}
