"""Tiny models with random weights in Hugging Face format, made by transformers itself, so that it is the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = 2  # <|im_end|>, in models with and without a tokenizer
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "A cache keeps what was computed, so that the next request need not compute it again.",
    "user assistant system What is the meaning of this word? It is the name of a thing.",
] * 3

# An odd vocabulary, grouped-query attention, and head_dim * heads != hidden_size: what sharding gets wrong first.
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "truncate": False,
}
DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
SPARSE: dict[str, Any] = {
    **LATENT,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "index_topk": 12,
    "index_n_heads": 8,
    "index_head_dim": 16,
}
GATED_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": PARTIAL_ROPE,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
SHARED_EXPERT = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_expand": 2,
}
GRANITE4: dict[str, Any] = {
    **MAMBA2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 48,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
    "hidden_size": 64,
    "mamba_n_heads": 8,
}
# With recurrent layers.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", {**GATED_DELTA_NET, **SHARED_EXPERT, "mlp_only_layers": [1]}),
    "qwen3_5": ("Qwen3_5", GATED_DELTA_NET),
    # as Qwen 3.5 27B and 3.8: six query heads to each KV head, three value heads to each key head
    "qwen3_8": (
        "Qwen3_5",
        {
            **GATED_DELTA_NET,
            "num_attention_heads": 12,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 12,
            "rope_parameters": {**PARTIAL_ROPE, "partial_rotary_factor": 0.25},
        },
    ),
    "qwen3_5_moe": ("Qwen3_5Moe", {**GATED_DELTA_NET, **SHARED_EXPERT}),
    "bamba": ("Bamba", {**MAMBA2, "attn_layer_indices": [1], "rope_parameters": PARTIAL_ROPE}),
    "granite4": ("GraniteMoeHybrid", {**GRANITE4, "num_local_experts": 0}),
    "granite4_moe": ("GraniteMoeHybrid", {**GRANITE4, "num_local_experts": 5, "position_embedding_type": "rope"}),
    "falcon_h1": (
        "FalconH1",
        {
            **MAMBA2,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "ssm_multipliers": [0.5, 1.5, 0.7, 1.3, 0.9],
            "mlp_multipliers": [0.8, 1.2],
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 1.5,
            "key_multiplier": 0.8,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 1.1,
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.9,
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            **LATENT,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "q_lora_rank": None,
            "num_experts": 8,
            "num_experts_per_token": 3,
            "num_shared_experts": 1,
            "model_max_length": 512,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "routed_scaling_factor": 2.4,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
        },
    ),
    "lfm2": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": True, "hidden_size": 64},
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "tie_word_embeddings": True,
            "hidden_size": 64,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "lfm3": (
        "Lfm3",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
            "sliding_window": 8,
            "hidden_size": 64,
            "tie_word_embeddings": True,
        },
    ),
}
GEMMA_WINDOWS: dict[str, Any] = {
    "tie_word_embeddings": True,
    "num_hidden_layers": 6,
    "sliding_window": 8,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_rope_scaled": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    ),
    "gemma3": (
        "Gemma3",
        {
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "tie_word_embeddings": True,
            "hidden_size": 64,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3n": (
        "Gemma3n",
        {
            **GEMMA_WINDOWS,
            "intermediate_size": [80, 64, 80, 80, 96, 80],
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 90,
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 3,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.8, 0.6, 0.0, 0.0, 0.0, 0.0],
        },
    ),
    # as E2B, 26B-A4B and 12B
    "gemma4": (
        "Gemma4",
        {
            **GEMMA_WINDOWS,
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 16,
        },
    ),
    "gemma4_moe": (
        "Gemma4",
        {
            **GEMMA_WINDOWS,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "final_logit_softcapping": 5.0,
            "use_bidirectional_attention": "vision",
        },
    ),
    "gemma4_unified": (
        "Gemma4Unified",
        {**GEMMA_WINDOWS, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    ),
    "phi3": ("Phi3", {"hidden_size": 64, "rope_parameters": {**PARTIAL_ROPE, "partial_rotary_factor": 0.75}}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "attention_bias": True,
            "use_qk_norm": True,
            "rope_parameters": PARTIAL_ROPE,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **LATENT,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "num_mtp_layers": 0,
            "rope_parameters": DEEPSEEK_ROPE,
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            **LATENT,
            "n_routed_experts": 8,
            "n_group": 1,
            "topk_group": 1,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "routed_scaling_factor": 1.8,
        },
    ),
    "deepseek_v32": ("DeepseekV32", {**SPARSE, "n_group": 4, "topk_group": 2, "rope_parameters": DEEPSEEK_ROPE}),
    "glm_moe_dsa": ("GlmMoeDsa", {**SPARSE, "indexer_types": ["full", "shared", "full"]}),
    "longcat_flash": (
        "LongcatFlash",
        {**LATENT, "num_layers": 2, "n_routed_experts": 6, "zero_expert_num": 3, "routed_scaling_factor": 2.5},
    ),
    "minicpm3": ("MiniCPM3", {**LATENT, "scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 24}),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {
            "num_key_value_heads": 1,
            "v_head_dim": 12,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {**PARTIAL_ROPE, "rope_theta": 1e6},
                "sliding_attention": PARTIAL_ROPE,
            },
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "rope_parameters": GPT_OSS_ROPE},
    ),
}


# Whole engines of these, and on ranks, are run with the slow tests: they differ from others in their layers only.
SLOW_ENGINES = (
    "llama_tied",
    "llama_rope_scaled",
    "mistral",
    "qwen2",
    "gemma2",
    "gemma3n",
    "gemma4",
    "gemma4_moe",
    "gemma4_unified",
    "phi3",
    "mixtral",
    "qwen2_moe",
    "glm4_moe",
    "mimo_v2_flash",
    "gpt_oss",
    "deepseek_v2",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "longcat_flash",
    "minicpm3",
)


TEXT_CONFIGS = (
    "Gemma3",
    "Gemma3n",
    "Gemma4",
    "Gemma4Unified",
    "Qwen3_5",
    "Qwen3_5Moe",
)  # beside those of whole multimodal models


def with_slow(names: Iterable[str], slow: Iterable[str] = SLOW_ENGINES) -> list[Any]:
    """Parameters of a test, with the mark `slow` on some."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


def make_model(folder: Path, family: str, *, tokenizer: bool = False, seed: int = 0, **overrides: Any) -> Path:
    """Write a model of `family` (a key of FAMILIES) into `folder` and return it; under 200 KB, float32.

    tokenizer: put a byte-level BPE tokenizer with a ChatML template beside it; the vocabulary is then its own (about
        400 tokens) instead of 97.
    overrides: fields of transformers' configuration class.
    """
    if tokenizer:
        bpe = make_tokenizer()
        bpe.save_pretrained(folder)
        overrides = {"vocab_size": len(bpe), **overrides}
    config = make_config(family, **overrides)
    model = getattr(transformers, (FAMILIES | HYBRIDS)[family][0] + "ForCausalLM")(config).eval()
    randomise(model, tied=config.tie_word_embeddings, seed=seed)
    model.generation_config = transformers.GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=0)
    model.save_pretrained(folder)
    return Path(folder)


def make_config(family: str, **overrides: Any) -> Any:
    """Return transformers' configuration of a small model. overrides: its fields."""
    name, fields = (FAMILIES | HYBRIDS)[family]
    fields = {**COMMON, **fields, **overrides}
    if "kv_lora_rank" in fields:
        del fields["head_dim"]
    if "num_layers" in fields:  # LongCat Flash, of which transformers derives the other number
        del fields["num_hidden_layers"]
        fields["head_dim"] = fields["qk_rope_head_dim"]
    return getattr(transformers, f"{name}TextConfig" if name in TEXT_CONFIGS else f"{name}Config")(**fields)


BUFFERS = ("e_score_correction_bias", "layer_scalar", "std_bias", "std_scale", "put_min", "put_max")


@torch.no_grad()
def randomise(model: torch.nn.Module, *, tied: bool, seed: int) -> None:
    """Unit-gain layers, peaky attention and uneven norms, so that greedy output is not one repeated token."""
    generator = torch.Generator().manual_seed(seed)
    learned = [pair for pair in model.named_buffers() if pair[0].endswith(BUFFERS)]
    for name, p in (*model.named_parameters(), *learned):
        noise = torch.randn(p.shape, generator=generator)
        if name in ("model.norm.weight", "model.language_model.norm.weight") and tied:
            p.copy_(noise - p.abs().max().eq(0).float())  # mixed signs: a tied head then does not favour its own input
        elif "norm" in name or "layer_scalar" in name:
            p.add_(0.2 * noise + ("q_norm" in name))  # around 1, or around 0 where the model scales by 1 + weight
        elif not p.dim():
            p.fill_(1.5 if name.endswith("max") else -1.5)
        elif p.dim() == 1:
            p.copy_(0.3 * noise)
        elif "embed_tokens" in name:
            p.copy_(noise * (0.3 if tied else 1.0))
        else:
            gain = 3.0 if "lm_head" in name else 1.5 if "q_proj" in name or "k_proj" in name else 1.0
            p.copy_(noise * gain / p.shape[-1] ** 0.5)


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE: every text has tokens, and every character outside ASCII is split over several."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(CORPUS, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=512
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a small model of a family, and makes it when it is first asked for."""
    return cache(lambda family: make_model(tmp_path_factory.mktemp(family), family))
