"""Gemma 2, 3, 3n and 4."""

from __future__ import annotations

from typing import Any

from engine.model.families.family import Family
from engine.model.families.wide_family import WideFamily

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

FAMILIES: dict[str, Family] = {
    "Gemma3ForCausalLM": WideFamily(
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
    "Gemma2ForCausalLM": WideFamily(
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
    "Gemma3nForCausalLM": WideFamily(
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
    "Gemma4ForCausalLM": WideFamily("gemma4.Gemma4ForCausalLM", (*GEMMA_KEYS, "num_experts"), GEMMA4),
    "Gemma4UnifiedForCausalLM": WideFamily(
        "gemma4.Gemma4ForCausalLM",
        GEMMA_KEYS,
        GEMMA4 | {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262_144},
    ),
}  # fmt: skip
