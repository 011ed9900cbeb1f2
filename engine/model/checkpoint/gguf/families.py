"""The architectures of llama.cpp that are read, and how a Hugging Face checkpoint names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from engine.model.checkpoint.gguf import experts, gemma, latent, recurrent, rope, xielu
from engine.model.checkpoint.gguf.entry import Entry
from engine.model.checkpoint.gguf.keys import Fields, GGUFError, Keys, Metadata
from engine.model.checkpoint.gguf.source import GGUFSource

RMS_NORM = "attention.layer_norm_rms_epsilon"
LAYER_NORM = "attention.layer_norm_epsilon"


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """How a Hugging Face checkpoint names an architecture of llama.cpp, and how its tensors differ."""

    architecture: str
    model_type: str
    fields: Fields = field(default_factory=dict)
    """Fields of config.json that are the same for all its models; None for one that is left out."""
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
    more: tuple[Callable[[GGUFSource], Fields], ...] = ()
    """Read further fields; a later one's replace an earlier one's."""
    reads: tuple[str, ...] = ()
    """Keys that `more` or `yarn` reads and that other families must not have."""
    yarn: Callable[[GGUFSource], Fields] | None = None
    """Reads YaRN's fields that only few families have."""
    own_heads: bool = False
    """Whether `more` reads the sizes of heads."""
    own_ropes: bool = False
    """Whether `more` reads how heads are rotated."""
    made: Callable[[GGUFSource], dict[str, Entry]] | None = None
    """Makes further tensors, from metadata."""
    tiled_heads: bool = False
    """Whether value heads of different key heads are side by side (recurrent.untiled)."""
    alternating_experts: bool = False
    """Whether checkpoints store the experts of a layer in one tensor, with alternating rows of gate and up."""


GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": None}
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
    "numbers": LINEAR, "norm_shift": 1.0, "partial_rotary": True,
    "renamed": {
        "self_attn.qkv_proj.": "linear_attn.in_proj_qkv.", "mamba.in_proj.": "linear_attn.in_proj_qkvz.",
    },
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
SHARED_EXPERTS = {"shared_expert.": "shared_experts."}
FALCON_H1_NAMES = {
    "linear_attn.": "mamba.", "mlp.": "feed_forward.", "model.norm.": "model.final_layernorm.",
    "pre_feedforward_layernorm.": "pre_ff_layernorm.",
}  # fmt: skip
NEMOTRON_H_NAMES = {
    **dict.fromkeys(("linear_attn.", "mamba.", "self_attn.", "mlp."), "mixer."), **SHARED_EXPERTS,
    "input_layernorm.": "norm.", "model.norm.": "model.norm_f.", "embed_tokens.": "embeddings.",
}  # fmt: skip
NEMOTRON_H_FIELDS = dict.fromkeys(("rms_norm_eps", "hidden_act", "num_hidden_layers"))  # under other names
NEMOTRON_H_NUMBERS = {
    "layer_norm_epsilon": RMS_NORM, "conv_kernel": "ssm.conv_kernel", "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count", "mamba_num_heads": "ssm.time_step_rank",
}  # fmt: skip
LATENT = ("attention.kv_lora_rank", "rope.scaling.yarn_log_multiplier")
LATENT_HEADS: dict[str, Any] = {"own_heads": True, "reads": LATENT, "yarn": rope.deepseek_yarn}
FAMILIES = {
    "llama": GGUFFamily("LlamaForCausalLM", "llama", rotated_pairs=True),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", "qwen2", BIASED),
    "qwen2moe": GGUFFamily(
        "Qwen2MoeForCausalLM", "qwen2_moe", {"norm_topk_prob": False} | BIASED, more=(experts.with_shared_expert,)
    ),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": GGUFFamily("Qwen3MoeForCausalLM", "qwen3_moe", {"norm_topk_prob": True}, more=(experts.common,)),
    "gemma2": GGUFFamily("Gemma2ForCausalLM", "gemma2", GEMMA, norm_shift=1.0, more=(gemma.gemma2,)),
    "gemma3": GGUFFamily("Gemma3ForCausalLM", "gemma3_text", GEMMA, norm_shift=1.0, more=(gemma.gemma3,)),
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
    "qwen35": GGUFFamily(
        "Qwen3_5ForCausalLM", "qwen3_5_text", more=(recurrent.linear_attention,), tiled_heads=True, **QWEN35
    ),
    "qwen35moe": GGUFFamily(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", tiled_heads=True,
        more=(recurrent.linear_attention, experts.with_shared_expert), **QWEN35,
    ),
    # computes the same as Qwen 3.5's code, whose projections of linear attention are apart, as in the file
    "qwen3next": GGUFFamily(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", more=(recurrent.linear_attention, experts.with_shared_expert),
        **QWEN35,
    ),
    "granitehybrid": GGUFFamily(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", numbers=GRANITE | MAMBA, renamed=GRANITE_HYBRID_NAMES,
        rotated_pairs=True, more=(recurrent.granite,),
    ),
    "falcon-h1": GGUFFamily(
        "FalconH1ForCausalLM", "falcon_h1", numbers=MAMBA, renamed=FALCON_H1_NAMES, more=(recurrent.falcon_h1,)
    ),
    **{
        name: GGUFFamily(
            "NemotronHForCausalLM", "nemotron_h", NEMOTRON_H_FIELDS, NEMOTRON_H_NUMBERS, NEMOTRON_H_NAMES,
            rotated_pairs=True, more=(recurrent.nemotron_h,),
        )
        for name in ("nemotron_h", "nemotron_h_moe")
    },
    "kimi-linear": GGUFFamily(
        "KimiLinearForCausalLM", "kimi_linear", {"max_position_embeddings": None},
        renamed=SHARED_EXPERTS | {
            "linear_attn.norm.": "self_attn.o_norm.", "linear_attn.in_proj_b.": "self_attn.b_proj.",
            "linear_attn.": "self_attn.",
        },
        more=(latent.heads, recurrent.kimi_linear), **LATENT_HEADS,
    ),
    "deepseek2": GGUFFamily(
        "DeepseekV3ForCausalLM", "deepseek_v3", renamed=SHARED_EXPERTS, more=(latent.deepseek,), **LATENT_HEADS
    ),
    "minicpm3": GGUFFamily(
        "MiniCPM3ForCausalLM", "minicpm3", {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256},
        more=(latent.heads,), **LATENT_HEADS,
    ),
    "gemma3n": GGUFFamily(
        "Gemma3nForCausalLM", "gemma3n_text", GEMMA, more=(gemma.gemma3n,), reads=("attention.shared_kv_layers",)
    ),
    "gemma4": GGUFFamily(
        "Gemma4ForCausalLM", "gemma4_text", GEMMA, own_heads=True, own_ropes=True, more=(gemma.gemma4,),
        renamed={
            "mlp.gate.scale.": "router.scale.", "mlp.experts.down_proj.scale.": "router.per_expert_scale.",
            "mlp.gate.": "router.proj.", "mlp.experts.": "experts.",
        },
        reads=("attention.shared_kv_layers",),
    ),
    "mistral3": GGUFFamily("MistralForCausalLM", "mistral", rotated_pairs=True),
    "apertus": GGUFFamily(
        "ApertusForCausalLM", "apertus", {"hidden_act": "xielu"}, made=xielu.parameters,
        renamed={"input_layernorm.": "attention_layernorm.", "post_attention_layernorm.": "feedforward_layernorm."},
    ),
    "lfm2": GGUFFamily(
        "Lfm2ForCausalLM", "lfm2", LFM2_FIELDS, LFM2_NUMBERS, LFM2_NAMES, more=(recurrent.short_convolutions,)
    ),
    "lfm2moe": GGUFFamily(
        "Lfm2MoeForCausalLM", "lfm2_moe", LFM2_FIELDS, LFM2_NUMBERS, LFM2_NAMES,
        more=(recurrent.short_convolutions, experts.lfm2),
    ),
    "glm4": GGUFFamily(
        "Glm4ForCausalLM", "glm4", partial_rotary=True,
        renamed={"mlp.up_proj.": "mlp.gate_up_proj.", "post_feedforward_layernorm.": "post_mlp_layernorm."},
    ),
    "glm4moe": GGUFFamily(
        "Glm4MoeForCausalLM", "glm4_moe", renamed=SHARED_EXPERTS, partial_rotary=True, more=(experts.glm,)
    ),
    "gpt-oss": GGUFFamily(
        "GptOssForCausalLM", "gpt_oss", renamed={"mlp.gate.": "mlp.router."}, alternating_experts=True,
        more=(experts.gpt_oss,),
    ),
}  # fmt: skip
VARIANTS: dict[str, tuple[Callable[[Keys], bool], GGUFFamily]] = {
    "llama": (
        lambda keys: bool(keys.get("expert_count")),
        GGUFFamily("MixtralForCausalLM", "mixtral", rotated_pairs=True, more=(experts.mixtral,)),
    ),
    "olmo2": (lambda keys: bool(keys.get("attention.sliding_window")), GGUFFamily("Olmo3ForCausalLM", "olmo3")),
    "deepseek2": (
        lambda keys: keys.get("expert_gating_func") != experts.SIGMOID,
        replace(FAMILIES["deepseek2"], architecture="DeepseekV2ForCausalLM", model_type="deepseek_v2"),
    ),
    "mistral3": (
        lambda keys: bool(keys.get("attention.temperature_scale")),
        GGUFFamily(
            "Ministral3ForCausalLM", "ministral3", rotated_pairs=True, yarn=rope.ministral_yarn,
            reads=("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
        ),
    ),
}  # fmt: skip
"""Second families that llama.cpp has under the same name: whether a file is of the second, and that family."""


def family(metadata: Metadata) -> GGUFFamily:
    """Return the family of a file. Raises GGUFError for an unknown architecture."""
    name = metadata.get("general.architecture")
    if name not in FAMILIES:
        raise GGUFError(f"general.architecture = {name!r} is not supported: must be one of {', '.join(FAMILIES)}")
    if (variant := VARIANTS.get(name)) is not None:
        is_second, second = variant
        if is_second(Keys(metadata)):
            return second
    return FAMILIES[name]
