"""Families with Llama's attention and a mixture of experts."""

from __future__ import annotations

from engine.model.families.family import Family
from engine.model.families.wide_family import WideFamily

FAMILIES: dict[str, Family] = {
    # Qwen 3 with a mixture of experts in most layers or all; a window, if any, is in all of them
    "Qwen3MoeForCausalLM": WideFamily(
        "moe.Qwen3MoeForCausalLM",
        ("sliding_window", "use_sliding_window", "attention_bias", "num_experts", "num_local_experts"),
        {"use_sliding_window": False, "sliding_window": 4096},
    ),
    # Mixtral, arXiv:2401.04088: Mistral with a mixture of experts in all layers
    "MixtralForCausalLM": WideFamily(
        "moe.LlamaMoeForCausalLM",
        ("sliding_window", "num_local_experts", "num_experts"),
        {"norm_topk_prob": True, "rope_theta": 1e6, "eos_token_id": 2},
    ),
    # Qwen 1.5 MoE and Qwen 2 MoE, arXiv:2407.10671, section 2.2.2: one more expert for all tokens, behind a gate
    "Qwen2MoeForCausalLM": WideFamily(
        "moe.LlamaMoeForCausalLM",
        ("sliding_window", "use_sliding_window", "layer_types", "num_experts", "shared_expert_intermediate_size"),
        {"use_sliding_window": False, "sliding_window": 4096, "sliding_window_pattern": 2, "qkv_bias": True},
    ),
    # GLM 4.5, arXiv:2508.06471: DeepSeek V3's routing and shared experts with Llama's attention
    "Glm4MoeForCausalLM": WideFamily(
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
    # MiMo V2 Flash: sinks and windows in most layers, whose values are smaller than keys; DeepSeek V3's routing
    "MiMoV2FlashForCausalLM": WideFamily(
        "mimo_v2.MiMoV2ForCausalLM",
        ("attention_bias", "partial_rotary_factor", "sliding_window", "layer_types", "n_routed_experts"),
        {
            "head_dim": 192, "v_head_dim": 128, "attention_value_scale": 0.707, "output_bias": False,
            "sliding_window": 129, "partial_rotary_factor": 0.334, "rope_theta": 5e6, "swa_rope_theta": 1e4,
            "rms_norm_eps": 1e-5, "scoring": "sigmoid", "norm_topk_prob": True,
        },
        activations=("silu",),
    ),
    # gpt-oss, arXiv:2508.10925: attention sinks, every second layer with a window, biases everywhere
    "GptOssForCausalLM": WideFamily(
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
