"""Families with latent attention, arXiv:2405.04434."""

from __future__ import annotations

from typing import Any

from engine.model.families.family import Family
from engine.model.families.wide_family import WideFamily

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

FAMILIES: dict[str, Family] = {
    # DeepSeek V2 and V3, and Kimi K2, whose config.json names V3: latent attention
    "DeepseekV2ForCausalLM": WideFamily(
        "deepseek.DeepseekForCausalLM",
        ("attention_bias", "mlp_bias", "n_routed_experts", "n_shared_experts", "first_k_dense_replace"),
        LATENT | {"scoring": "group_limited", "topk_method": "greedy", "n_shared_experts": 2, "n_routed_experts": 64},
    ),
    "DeepseekV3ForCausalLM": WideFamily("deepseek.DeepseekForCausalLM", LATENT_EXPERTS, DEEPSEEK_V3),
    # GLM 4.7 Flash
    "Glm4MoeLiteForCausalLM": WideFamily(
        "deepseek.DeepseekForCausalLM", LATENT_EXPERTS, DEEPSEEK_V3 | {"first_k_dense_replace": 1, "n_group": 1},
    ),
    # DeepSeek V3.2 and GLM 5: each token sees those that an indexer selects
    "DeepseekV32ForCausalLM": WideFamily(
        "deepseek.DeepseekV32ForCausalLM", LATENT_EXPERTS, DEEPSEEK_V3 | {"index_interleaved": False},
    ),
    "GlmMoeDsaForCausalLM": WideFamily(
        "deepseek.DeepseekV32ForCausalLM",
        LATENT_EXPERTS,
        DEEPSEEK_V3 | {"n_group": 1, "topk_group": 1, "index_interleaved": True, "rms_norm_eps": 1e-5},
    ),
    # LongCat Flash: each layer attends twice, and some of its experts compute nothing
    "LongcatFlashForCausalLM": WideFamily(
        "longcat.LongcatForCausalLM",
        ("attention_bias", "n_routed_experts", "router_bias"),
        LATENT | {
            "num_attention_heads": 64, "num_key_value_heads": None, "hidden_act": "silu", "rope_theta": 1e7,
            "rms_norm_eps": 1e-5, "zero_expert_num": 256, "routed_scaling_factor": 6.0,
        },
    ),
    "MiniCPM3ForCausalLM": WideFamily(
        "deepseek.MiniCPM3ForCausalLM",
        ("attention_bias", "mlp_bias"),
        LATENT | {"rope_interleave": False, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ),
}  # fmt: skip
