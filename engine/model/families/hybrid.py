"""Families with recurrent layers."""

from __future__ import annotations

from typing import Any

from engine.model.families.family import Family
from engine.model.families.latent import LATENT
from engine.model.families.wide_family import WideFamily

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
SILU = ("silu",)  # transformers applies it to the convolutions of recurrent layers too

FAMILIES: dict[str, Family] = {
    # Qwen3-Next: Gated DeltaNet in three of four layers, gated attention in the others
    "Qwen3NextForCausalLM": WideFamily(
        "hybrid.qwen3_next.Qwen3NextForCausalLM",
        (*QWEN_HYBRID, "num_experts", "num_local_experts", "shared_expert_intermediate_size"),
        QWEN_HYBRID_FIELDS | {"norm_topk_prob": True, "num_key_value_heads": 2},
        activations=SILU,
    ),
    # Qwen 3.5 and 3.6: the same with the projections of Gated DeltaNet side by side, dense or with experts
    "Qwen3_5ForCausalLM": WideFamily(
        "hybrid.qwen3_next.Qwen35ForCausalLM", QWEN_HYBRID, QWEN_HYBRID_FIELDS, activations=SILU
    ),
    "Qwen3_5MoeForCausalLM": WideFamily(
        "hybrid.qwen3_next.Qwen35ForCausalLM",
        (*QWEN_HYBRID, "num_experts", "num_local_experts", "shared_expert_intermediate_size"),
        QWEN_HYBRID_FIELDS | {"norm_topk_prob": True, "num_key_value_heads": 2, "intermediate_size": 0},
        activations=SILU,
    ),
    "BambaForCausalLM": WideFamily(
        "hybrid.bamba.BambaForCausalLM",
        ("attention_bias", "mlp_bias", "partial_rotary_factor"),
        MAMBA2 | {"partial_rotary_factor": 0.5, "attn_layer_indices": [], "eos_token_id": 2},
        activations=SILU,
    ),
    # Granite 4, with and without recurrent layers
    "GraniteMoeHybridForCausalLM": WideFamily(
        "hybrid.granite4.Granite4ForCausalLM",
        ("attention_bias", "attention_multiplier", "layer_types", "num_local_experts"),
        MAMBA2 | {
            "position_embedding_type": None, "attention_multiplier": 1.0, "num_local_experts": 8,
            "norm_topk_prob": True, "eos_token_id": 2,
        },
        activations=SILU,
    ),
    "FalconH1ForCausalLM": WideFamily(
        "hybrid.falcon_h1.FalconH1ForCausalLM",
        ("attention_bias", "mlp_bias"),
        MAMBA2 | {"mamba_rms_norm": False, "mamba_norm_before_gate": True, "eos_token_id": 2},
        activations=SILU,
    ),
    "KimiLinearForCausalLM": WideFamily(
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
        activations=SILU,
    ),
    # Nemotron-H and Nemotron 3
    "NemotronHForCausalLM": WideFamily(
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
    "Lfm2ForCausalLM": WideFamily("hybrid.lfm2.Lfm2ForCausalLM", ("layer_types",), LFM2, activations=SILU),
    "Lfm2MoeForCausalLM": WideFamily(
        "hybrid.lfm2.Lfm2ForCausalLM",
        ("layer_types", "num_experts"),
        LFM2 | {"block_auto_adjust_ff_dim": False, "scoring": "sigmoid", "norm_topk_prob": True, "num_dense_layers": 2},
        activations=SILU,
    ),
    # LFM3: the same with windows, gated heads and more norms
    "Lfm3ForCausalLM": WideFamily(
        "hybrid.lfm3.Lfm3ForCausalLM",
        ("layer_types", "sliding_window", "attention_bias"),
        LFM2 | {
            "block_auto_adjust_ff_dim": False, "conv_L_cache": 7, "sliding_window": 256, "head_dim": 128,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            },
        },
        activations=SILU,
    ),
}  # fmt: skip
