"""The model families: which class computes each architecture, and which fields of config.json matter to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from engine.errors import UnsupportedArchitecture
from engine.model.checkpoint.fields import Fields

# Fields of config.json that some families read and others ignore.
OPTIONAL = frozenset({
    "attention_bias", "mlp_bias", "qkv_bias", "hidden_activation", "query_pre_attn_scalar",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern",
    "rope_local_base_freq", "partial_rotary_factor", "use_qk_norm", "use_bidirectional_attention",
    "num_experts", "num_local_experts", "n_routed_experts", "shared_expert_intermediate_size", "n_shared_experts",
    "first_k_dense_replace", "num_nextn_predict_layers", "swiglu_limit", "swiglu_alpha",
    "output_bias", "router_bias", "scoring", "recurrent", "full_attention_interval",
    "attention_multiplier",
    # names that only the code gives to fields
    "mlp_sizes", "shared_gate", "shared_name", "first_position", "index_interleaved", "linear_head_dim",
    "linear_num_heads",
})  # fmt: skip

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture is computed."""

    model: str
    """The class that computes it, as `file.Class` in models/."""
    keys: tuple[str, ...] = ()
    """The fields in OPTIONAL that transformers' code of this family reads."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Values for fields that a config.json may lack: transformers' defaults, or constants of the family's code."""
    activations: tuple[str, ...] = ("silu", "gelu_pytorch_tanh")
    """The activations that its MLPs support."""
    encoder: bool = False
    """Whether its tokens see each other in both directions; it then has no head that generates."""

    def fields(self, raw: Fields) -> Fields:
        """Return the fields of config.json that this family reads. Raises KeyError if an MoE has no `num_experts`."""
        own = raw.pick(lambda key: key not in OPTIONAL or key in self.keys)
        counts = [key for key in NUM_EXPERTS if key in self.keys]
        fields = self.defaults | own
        if counts and fields.get("enable_moe_block", True) and all(own.get(key) is None for key in counts):
            raise KeyError(counts[0])
        return fields


# Multimodal models: for each, the architecture in FAMILIES by the model_type of its text part, and fields that differ
# from the family's. Nothing but the text part is read.
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
TEXT_PARTS: dict[str, tuple[dict[str, str], dict[str, bool]]] = {
    "Gemma3ForConditionalGeneration": ({"gemma3_text": "Gemma3ForCausalLM"}, TIED),
    "Gemma3nForConditionalGeneration": ({"gemma3n_text": "Gemma3nForCausalLM"}, TIED),
    "Gemma4ForConditionalGeneration": ({"gemma4_text": "Gemma4ForCausalLM"}, TIED),
    "Gemma4UnifiedForConditionalGeneration": ({"gemma4_unified_text": "Gemma4UnifiedForCausalLM"}, TIED),
    "Idefics3ForConditionalGeneration": ({"llama": "LlamaForCausalLM"}, UNTIED),
    "InternVLForConditionalGeneration": (
        {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}, TIED
    ),
    "LlavaNextForConditionalGeneration": (
        {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}, UNTIED
    ),
    "Mistral3ForConditionalGeneration": ({"mistral": "MistralForCausalLM"}, TIED),
    "Qwen2VLForConditionalGeneration": ({"qwen2_vl_text": "Qwen2ForCausalLM"}, UNTIED),
    "Qwen2_5_VLForConditionalGeneration": ({"qwen2_5_vl_text": "Qwen2ForCausalLM"}, UNTIED),
    "Qwen3VLForConditionalGeneration": ({"qwen3_vl_text": "Qwen3ForCausalLM"}, UNTIED),
    "Qwen3VLMoeForConditionalGeneration": (
        {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"}, {**UNTIED, "norm_topk_prob": True, "use_sliding_window": False}
    ),
    "Qwen3_5ForConditionalGeneration": ({"qwen3_5_text": "Qwen3_5ForCausalLM"}, UNTIED),
    "Qwen3_5MoeForConditionalGeneration": ({"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}, UNTIED),
    "SmolVLMForConditionalGeneration": ({"llama": "LlamaForCausalLM"}, UNTIED),
}  # fmt: skip
# Models with image input, and how their rotary frequencies are assigned to time, height and width: in one section per
# axis (Qwen2-VL, arXiv:2409.12191), interleaved (Qwen3-VL, arXiv:2511.21631), or None if positions have one axis.
VISION: dict[str, Literal["sections", "interleaved"] | None] = {
    "Gemma3ForConditionalGeneration": None,
    "Gemma4ForConditionalGeneration": None,
    "InternVLForConditionalGeneration": None,
    "Mistral3ForConditionalGeneration": None,
    "Qwen2_5_VLForConditionalGeneration": "sections",
    "Qwen3VLForConditionalGeneration": "interleaved",
    "Qwen3VLMoeForConditionalGeneration": "interleaved",
    "Qwen3_5ForConditionalGeneration": "interleaved",
    "Qwen3_5MoeForConditionalGeneration": "interleaved",
}
LLAMA, QWEN3 = "llama.LlamaForCausalLM", "qwen3.Qwen3ForCausalLM"
QWEN_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
QWEN_HYBRID = ("attention_bias", "layer_types", "partial_rotary_factor", "full_attention_interval")
QWEN_HYBRID_FIELDS: dict[str, Any] = {
    "recurrent": "gated_delta_net",
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "mtp_num_hidden_layers": 1,
}
GEMMA_KEYS = (
    "attention_bias", "hidden_activation", "sliding_window", "layer_types", "rope_local_base_freq",
    "final_logit_softcapping", "use_bidirectional_attention",
)  # fmt: skip
GEMMA_FIELDS: dict[str, Any] = {
    "num_attention_heads": 8, "head_dim": 256, "attention_multiplier": 1.0, "sliding_window": 512,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "eos_token_id": 1,
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
}  # fmt: skip
GEMMA4 = GEMMA_FIELDS | {
    "vocab_size": 262_144, "num_key_value_heads": 4, "max_position_embeddings": 131_072, "sliding_window_pattern": 6,
    "num_kv_shared_layers": 0, "global_head_dim": 512, "norm_topk_prob": True, "enable_moe_block": False,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}  # fmt: skip
LATENT: dict[str, Any] = {"output_bias": False, "eos_token_id": 2}
LATENT_EXPERTS = (
    "attention_bias",
    "n_routed_experts",
    "n_shared_experts",
    "first_k_dense_replace",
    "num_nextn_predict_layers",
)
DEEPSEEK_V3 = LATENT | {
    "eos_token_id": 1,
    "scoring": "sigmoid",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "n_routed_experts": 256,
}
MAMBA2: dict[str, Any] = {
    "recurrent": "mamba2",
    "mamba_d_conv": 4,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_conv_bias": True,
}
LFM2: dict[str, Any] = {
    "recurrent": "short_conv",
    "hidden_act": "silu",
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "eos_token_id": 2,
}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(LLAMA, ("attention_bias", "mlp_bias"), {"eos_token_id": 2}),
    # Mistral, arXiv:2310.06825: Llama with a sliding attention window in all layers
    "MistralForCausalLM": Family(LLAMA, ("sliding_window",), {"sliding_window": 4096, "eos_token_id": 2}),
    # Qwen 2 and 2.5, arXiv:2407.10671: Llama with biases on Q, K and V
    "Qwen2ForCausalLM": Family(
        LLAMA,
        QWEN_WINDOW,
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "qkv_bias": True},
    ),
    "Qwen3ForCausalLM": Family(
        QWEN3,
        (*QWEN_WINDOW, "attention_bias"),
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    ),
    # Qwen 3 with a mixture of experts in most layers or all; a window, if any, is in all of them
    "Qwen3MoeForCausalLM": Family(
        QWEN3,
        ("sliding_window", "use_sliding_window", "attention_bias", "num_experts", "num_local_experts"),
        {"use_sliding_window": False, "sliding_window": 4096},
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3.Gemma3ForCausalLM",
        (
            "attention_bias", "hidden_activation", "query_pre_attn_scalar", "sliding_window", "layer_types",
            "sliding_window_pattern", "rope_local_base_freq", "use_bidirectional_attention",
        ),
        {
            "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4,
            "max_position_embeddings": 131_072, "tie_word_embeddings": True, "head_dim": 256,
            "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
            "hidden_activation": "gelu_pytorch_tanh", "eos_token_id": 1,
        },
    ),
    # Gemma 2: every second layer has a window; attention scores and logits are capped
    "Gemma2ForCausalLM": Family(
        "gemma2.Gemma2ForCausalLM",
        (
            "attention_bias", "hidden_activation", "query_pre_attn_scalar", "sliding_window", "layer_types",
            "attn_logit_softcapping", "final_logit_softcapping",
        ),
        {
            "tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "sliding_window_pattern": 2, "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "eos_token_id": 1,
        },
    ),
    # Gemma 3n: E2B and E4B
    "Gemma3nForCausalLM": Family(
        "gemma3n.Gemma3nForCausalLM",
        GEMMA_KEYS,
        GEMMA_FIELDS | {
            "vocab_size": 262_400, "num_key_value_heads": 2, "max_position_embeddings": 32_768,
            "sliding_window_pattern": 5, "final_logit_softcapping": 30.0, "num_kv_shared_layers": 15,
            "rope_theta": 1e6, "rope_local_base_freq": 1e4,
            "altup_num_inputs": 4, "laurel_rank": 64,
        },
    ),
    # Gemma 4: E2B, E4B, 31B, and 26B-A4B with experts; 12B
    "Gemma4ForCausalLM": Family("gemma4.Gemma4ForCausalLM", (*GEMMA_KEYS, "num_experts"), GEMMA4),
    "Gemma4UnifiedForCausalLM": Family(
        "gemma4.Gemma4ForCausalLM",
        GEMMA_KEYS,
        GEMMA4 | {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262_144},
    ),
    # Phi 3 and 4: Llama with merged projections, parts of heads rotated, and `longrope`
    "Phi3ForCausalLM": Family(
        "phi3.Phi3ForCausalLM",
        ("sliding_window", "partial_rotary_factor"),
        {"partial_rotary_factor": 1.0, "eos_token_id": 32_000},
    ),
    # Mixtral, arXiv:2401.04088: Mistral with a mixture of experts in all layers
    "MixtralForCausalLM": Family(
        LLAMA,
        ("sliding_window", "num_local_experts", "num_experts"),
        {"norm_topk_prob": True, "rope_theta": 1e6, "eos_token_id": 2},
    ),
    # Qwen 1.5 MoE and Qwen 2 MoE, arXiv:2407.10671, section 2.2.2: one more expert for all tokens, behind a gate
    "Qwen2MoeForCausalLM": Family(
        LLAMA,
        ("sliding_window", "use_sliding_window", "layer_types", "num_experts", "shared_expert_intermediate_size"),
        {"use_sliding_window": False, "sliding_window": 4096, "sliding_window_pattern": 2, "qkv_bias": True},
    ),
    # GLM 4.5, arXiv:2508.06471: DeepSeek V3's routing and shared experts with Llama's attention
    "Glm4MoeForCausalLM": Family(
        "glm4_moe.Glm4MoeForCausalLM",
        (
            "attention_bias", "partial_rotary_factor", "use_qk_norm", "n_routed_experts", "n_shared_experts",
            "first_k_dense_replace", "num_nextn_predict_layers",
        ),
        {
            "partial_rotary_factor": 0.5, "output_bias": False, "scoring": "sigmoid", "norm_topk_prob": True,
            "n_shared_experts": 1, "first_k_dense_replace": 1,
        },
    ),
    # Qwen3-Next: Gated DeltaNet in three of four layers, gated attention in the others
    "Qwen3NextForCausalLM": Family(
        "hybrid.qwen3_next.Qwen3NextForCausalLM",
        (*QWEN_HYBRID, "num_experts", "num_local_experts", "shared_expert_intermediate_size"),
        QWEN_HYBRID_FIELDS | {"norm_topk_prob": True, "num_key_value_heads": 2},
    ),
    # Qwen 3.5 and 3.6: the same with the projections of Gated DeltaNet side by side, dense or with experts
    "Qwen3_5ForCausalLM": Family("hybrid.qwen3_next.Qwen35ForCausalLM", QWEN_HYBRID, QWEN_HYBRID_FIELDS),
    "Qwen3_5MoeForCausalLM": Family(
        "hybrid.qwen3_next.Qwen35ForCausalLM",
        (*QWEN_HYBRID, "num_experts", "num_local_experts", "shared_expert_intermediate_size"),
        QWEN_HYBRID_FIELDS | {"norm_topk_prob": True, "num_key_value_heads": 2, "intermediate_size": 0},
    ),
    # DeepSeek V2 and V3, and Kimi K2, whose config.json names V3: latent attention
    "DeepseekV2ForCausalLM": Family(
        "deepseek.DeepseekForCausalLM",
        ("attention_bias", "mlp_bias", "n_routed_experts", "n_shared_experts", "first_k_dense_replace"),
        LATENT | {"scoring": "group_limited", "topk_method": "greedy", "n_shared_experts": 2, "n_routed_experts": 64},
    ),
    "DeepseekV3ForCausalLM": Family("deepseek.DeepseekForCausalLM", LATENT_EXPERTS, DEEPSEEK_V3),
    # GLM 4.7 Flash
    "Glm4MoeLiteForCausalLM": Family(
        "deepseek.DeepseekForCausalLM", LATENT_EXPERTS, DEEPSEEK_V3 | {"first_k_dense_replace": 1, "n_group": 1},
    ),
    # DeepSeek V3.2 and GLM 5: each token sees those that an indexer selects
    "DeepseekV32ForCausalLM": Family(
        "deepseek.DeepseekV32ForCausalLM", LATENT_EXPERTS, DEEPSEEK_V3 | {"index_interleaved": False},
    ),
    "GlmMoeDsaForCausalLM": Family(
        "deepseek.DeepseekV32ForCausalLM",
        LATENT_EXPERTS,
        DEEPSEEK_V3 | {"n_group": 1, "topk_group": 1, "index_interleaved": True, "rms_norm_eps": 1e-5},
    ),
    "MiniCPM3ForCausalLM": Family(
        "deepseek.MiniCPM3ForCausalLM",
        ("attention_bias", "mlp_bias"),
        LATENT | {"rope_interleave": False, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ),
    "BambaForCausalLM": Family(
        "hybrid.bamba.BambaForCausalLM",
        ("attention_bias", "mlp_bias", "partial_rotary_factor"),
        MAMBA2 | {"partial_rotary_factor": 0.5, "attn_layer_indices": [], "eos_token_id": 2},
    ),
    # Granite 4, with and without recurrent layers
    "GraniteMoeHybridForCausalLM": Family(
        "hybrid.granite4.Granite4ForCausalLM",
        ("attention_bias", "attention_multiplier", "layer_types", "num_local_experts"),
        MAMBA2 | {
            "position_embedding_type": None, "attention_multiplier": 1.0, "num_local_experts": 8,
            "norm_topk_prob": True, "eos_token_id": 2,
        },
    ),
    "FalconH1ForCausalLM": Family(
        "hybrid.falcon_h1.FalconH1ForCausalLM",
        ("attention_bias", "mlp_bias"),
        MAMBA2 | {"mamba_rms_norm": False, "mamba_norm_before_gate": True, "eos_token_id": 2},
    ),
    "KimiLinearForCausalLM": Family(
        "hybrid.kimi_linear.KimiLinearForCausalLM",
        (
            "layer_types", "num_experts", "first_k_dense_replace", "num_nextn_predict_layers", "n_shared_experts",
            "linear_head_dim", "linear_num_heads",
        ),
        LATENT | {
            "recurrent": "kimi_delta_attention", "position_embedding_type": "nope", "rope_interleave": False,
            "hidden_act": "silu", "scoring": "sigmoid", "first_k_dense_replace": 1, "q_lora_rank": None,
            "num_expert_group": 1, "topk_group": 1, "num_shared_experts": 1, "moe_renormalize": True,
        },
    ),
    # Nemotron-H and Nemotron 3
    "NemotronHForCausalLM": Family(
        "hybrid.nemotron_h.NemotronHForCausalLM",
        ("attention_bias", "mlp_bias", "n_routed_experts"),
        {
            "recurrent": "nemotron_h", "position_embedding_type": "nope", "hidden_act": "relu2",
            "layer_norm_epsilon": 1e-5, "conv_kernel": 4, "n_groups": 8, "ssm_state_size": 128, "mamba_num_heads": 128,
            "mamba_head_dim": 64, "n_routed_experts": 0, "scoring": "sigmoid", "norm_topk_prob": True,
            "head_dim": 128, "eos_token_id": 2,
        },
        activations=("relu2",),
    ),
    # LFM2: short convolutions
    "Lfm2ForCausalLM": Family("hybrid.lfm2.Lfm2ForCausalLM", ("layer_types",), LFM2),
    "Lfm2MoeForCausalLM": Family(
        "hybrid.lfm2.Lfm2ForCausalLM",
        ("layer_types", "num_experts"),
        LFM2 | {"block_auto_adjust_ff_dim": False, "scoring": "sigmoid", "norm_topk_prob": True, "num_dense_layers": 2},
    ),
    # gpt-oss, arXiv:2508.10925: attention sinks, every second layer with a window, biases everywhere
    "GptOssForCausalLM": Family(
        "gpt_oss.GptOssForCausalLM",
        (
            "attention_bias", "sliding_window", "layer_types", "num_local_experts", "num_experts", "swiglu_limit",
            "swiglu_alpha",
        ),
        {
            "attention_bias": True, "head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2,
            "rope_theta": 150_000.0, "norm_topk_prob": True, "router_bias": True,
        },
    ),
}  # fmt: skip


# The base models of encoders; each also exists with a head for pretraining, and with a score head.
BERT_FIELDS = {"hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12}
BERT = Family("bert.BertModel", (), {**BERT_FIELDS, "first_position": 0}, encoder=True)
ROBERTA = Family("bert.RobertaModel", (), {**BERT_FIELDS, "pad_token_id": 1}, encoder=True)
ENCODERS: dict[str, Family] = {
    "BertModel": BERT,
    "RobertaModel": ROBERTA,
    "XLMRobertaModel": ROBERTA,
    "ModernBertModel": Family(
        "modernbert.ModernBertModel",
        ("attention_bias", "mlp_bias", "hidden_activation", "layer_types"),
        {
            "hidden_activation": "gelu", "max_position_embeddings": 8192, "local_attention": 128, "norm_eps": 1e-5,
            "global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0,
        },
        encoder=True,
    ),
}  # fmt: skip
# What is computed from the hidden states: next tokens, a score, or nothing.
Head = Literal["lm", "score", "none"]
HEADS: dict[str, Head] = {
    "LMHeadModel": "lm",
    "ForSequenceClassification": "score",
    "ForMaskedLM": "none",
    "TextModel": "none",
    "Model": "none",
}
# Architectures that transformers' own code computes in tests/engine/model/transformers_backend, with models that have
# them. Others that transformers knows may run as well.
TRANSFORMERS: dict[str, str] = {
    "AfmoeForCausalLM": "Trinity",
    "ApertusForCausalLM": "Apertus",
    "ArceeForCausalLM": "AFM-4.5B",
    "CohereForCausalLM": "Command R, Aya 23",
    "Cohere2ForCausalLM": "Command R7B, Command A",
    "CwmForCausalLM": "CWM",
    "Dots1ForCausalLM": "dots.llm1",
    "Ernie4_5ForCausalLM": "ERNIE 4.5 0.3B",
    "Ernie4_5_MoeForCausalLM": "ERNIE 4.5 21B-A3B, 300B-A47B",
    "Exaone4ForCausalLM": "EXAONE 4",
    "ExaoneMoeForCausalLM": "K-EXAONE",
    "FlexOlmoForCausalLM": "FlexOlmo",
    "GPT2LMHeadModel": "GPT-2",
    "GPTBigCodeForCausalLM": "StarCoder, SantaCoder",
    "GPTNeoXForCausalLM": "Pythia, GPT-NeoX",
    "GemmaForCausalLM": "Gemma",
    "Glm4ForCausalLM": "GLM-4-0414",
    "GlmForCausalLM": "GLM-4-9B, GLM-Edge",
    "GraniteForCausalLM": "Granite 3",
    "GraniteMoeForCausalLM": "Granite 3 MoE",
    "GraniteMoeSharedForCausalLM": "Granite MoE with shared experts",
    "HeliumForCausalLM": "Helium",
    "HunYuanDenseV1ForCausalLM": "Hunyuan 0.5B to 7B",
    "HunYuanMoEV1ForCausalLM": "Hunyuan-A13B",
    "HyperCLOVAXForCausalLM": "HyperCLOVA X SEED",
    "Jais2ForCausalLM": "Jais 2",
    "Llama4ForCausalLM": "Llama 4, text",
    "Llama4ForConditionalGeneration": "Llama 4, text part",
    "MellumForCausalLM": "Mellum",
    "MiniMaxM2ForCausalLM": "MiniMax M2",
    "Ministral3ForCausalLM": "Ministral 3, text",
    "MinistralForCausalLM": "Ministral 8B",
    "Mistral3ForConditionalGeneration": "Ministral 3, text part",
    "ModernBertDecoderForCausalLM": "Ettin decoders",
    "NanoChatForCausalLM": "nanochat",
    "NemotronForCausalLM": "Nemotron-4, Minitron",
    "OPTForCausalLM": "OPT",
    "Olmo2ForCausalLM": "OLMo 2",
    "Olmo3ForCausalLM": "OLMo 3",
    "OlmoForCausalLM": "OLMo",
    "OlmoeForCausalLM": "OLMoE",
    "PersimmonForCausalLM": "Persimmon",
    "PhiForCausalLM": "Phi-1.5, Phi-2",
    "PhimoeForCausalLM": "Phi-3.5-MoE",
    "SeedOssForCausalLM": "Seed-OSS",
    "SmolLM3ForCausalLM": "SmolLM3",
    "SolarOpenForCausalLM": "Solar Open",
    "Starcoder2ForCausalLM": "StarCoder2",
    "VaultGemmaForCausalLM": "VaultGemma",
}
# The architectures in TRANSFORMERS for which transformers has no tensor-parallel plan.
ONE_RANK = frozenset({
    "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "ModernBertDecoderForCausalLM", "OPTForCausalLM",
    "PersimmonForCausalLM",
})  # fmt: skip


def find_family(architecture: str) -> Family | None:
    """Return the family of an architecture, which can also be a family's base model or its variant with a score head;
    None if only transformers' own code can compute it. Raises UnsupportedArchitecture."""
    base = architecture.removesuffix(next(filter(architecture.endswith, HEADS), ""))
    for family in (FAMILIES.get(architecture), ENCODERS.get(f"{base}Model")):
        if family is not None:
            return family
    if head_of(architecture) == "lm":
        return None
    if architecture.endswith("ForMaskedLM") or f"{base}ForCausalLM" not in FAMILIES:
        reason = "embeddings and scores are computed only by native families, and none of them has this architecture"
        raise UnsupportedArchitecture(architecture, reason)
    return FAMILIES[f"{base}ForCausalLM"]


def head_of(architecture: str) -> Head:
    return next((head for suffix, head in HEADS.items() if architecture.endswith(suffix)), "lm")


def text_part(raw: Fields) -> tuple[str, Fields]:
    """Return the architecture and the fields of a model's text part. A text model is its own text part.

    raw: the contents of config.json. For text, the parts of a multimodal position (`mrope`) are all equal, so the
    ordinary rotary embedding is used.
    """
    architecture = (raw.get("architectures") or ["none"])[0]
    kinds, fields = TEXT_PARTS.get(architecture, ({}, UNTIED))
    # older files of Qwen2.5-VL have the text part's fields at the top level
    own = raw.get("text_config") or {"model_type": next(iter(kinds), "")}
    if (family := kinds.get(own.get("model_type", ""))) is None:
        return architecture, raw
    tied = raw.get("tie_word_embeddings", fields["tie_word_embeddings"])
    text = Fields({**raw, **own}) | fields | {"tie_word_embeddings": tied}
    for key in ("rope_scaling", "rope_parameters"):
        if (text.get(key) or {}).get("mrope_section"):
            rope = {name: value for name, value in text[key].items() if not name.startswith("mrope")}
            text[key] = rope | {name: "default" for name in ("type", "rope_type") if rope.get(name) == "mrope"}
    return family, text
