"""The keys of GGUF files, as llama.cpp's convert_hf_to_gguf.py writes them for a config.json."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

KEYS = {
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "head_dim": "attention.key_length", "sliding_window": "attention.sliding_window", "num_experts": "expert_count",
    "num_local_experts": "expert_count", "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length", "n_shared_experts": "expert_shared_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length", "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale", "first_k_dense_replace": "leading_dense_block_count",
    "n_group": "expert_group_count", "topk_group": "expert_group_used_count",
    "mamba_d_conv": "ssm.conv_kernel", "mamba_d_state": "ssm.state_size", "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank", "shared_intermediate_size": "expert_shared_feed_forward_length",
    "layer_norm_eps": "attention.layer_norm_epsilon", "norm_epsilon": "attention.layer_norm_epsilon",
    "logit_scale": "logit_scale", "norm_eps": "attention.layer_norm_rms_epsilon", "conv_L_cache": "shortconv.l_cache",
    "num_dense_layers": "leading_dense_block_count", "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale", "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size", "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "altup_num_inputs": "altup.num_inputs", "altup_active_idx": "altup.active_idx",
    "top_k_experts": "expert_used_count",
    "mamba_d_ssm": "ssm.inner_size", "conv_kernel": "ssm.conv_kernel", "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count", "mamba_num_heads": "ssm.time_step_rank", "moe_latent_size": "moe_latent_size",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "kv_lora_rank": "attention.kv_lora_rank", "q_lora_rank": "attention.q_lora_rank",
    "linear_head_dim": "kda.head_dim", "num_shared_experts": "expert_shared_count",
    "num_experts_per_token": "expert_used_count", "model_max_length": "context_length",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip


def keys(raw: dict[str, Any], arch: str) -> dict[str, Any]:
    found = {f"{arch}.{key}": raw[name] for name, key in KEYS.items() if raw.get(name) is not None}
    found[f"{arch}.attention.value_length"] = raw["head_dim"]
    rope = raw.get("rope_parameters") or {"rope_type": "default", "rope_theta": 1e4}
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    found[f"{arch}.rope.freq_base"] = float(rope["rope_theta"])
    found[f"{arch}.rope.dimension_count"] = int(raw["head_dim"] * rope.get("partial_rotary_factor", 1.0))
    if local:
        found[f"{arch}.rope.freq_base_swa"] = float(local["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {f"{arch}.rope.scaling.type": rope["rope_type"], f"{arch}.rope.scaling.factor": float(rope["factor"])}
    if original := rope.get("original_max_position_embeddings"):
        found[f"{arch}.rope.scaling.original_context_length"] = original
    found[f"{arch}.vocab_size"] = raw["vocab_size"]
    if raw.get("sliding_window") and arch in ("olmo2", "exaone4", "gemma3n", "gemma4"):
        found[f"{arch}.attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in raw["layer_types"]]
    if arch.startswith("qwen3") and "linear_num_key_heads" in raw:
        found[f"{arch}.ssm.inner_size"] = raw["linear_value_head_dim"] * raw["linear_num_value_heads"]
        found[f"{arch}.full_attention_interval"] = 4
    if arch == "granitehybrid":
        found[f"{arch}.ssm.inner_size"] = raw["mamba_d_head"] * raw["mamba_n_heads"]
        found[f"{arch}.rope.scaling.finetuned"] = raw["position_embedding_type"] == "rope"
    if arch.startswith("lfm2") or arch == "granitehybrid":
        counts = [raw["num_key_value_heads"] if kind == "full_attention" else 0 for kind in raw["layer_types"]]
        found[f"{arch}.attention.head_count_kv"] = counts
    if arch == "gpt-oss":
        found["gpt-oss.expert_feed_forward_length"] = raw["intermediate_size"]
    found |= {f"{arch}.{key}": value for key, value in own_keys(raw, arch, rope).items()}
    return {key: value for key, value in found.items() if value is not None}


def own_keys(raw: dict[str, Any], arch: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Keys that one architecture has, or has in a form of its own. rope: of layers without a window."""
    match arch:
        case "gemma3n":
            return {
                "activation_sparsity_scale": [
                    NormalDist().inv_cdf(part) if part else -float("inf") for part in raw["activation_sparsity_pattern"]
                ],
                "final_logit_softcapping": raw["final_logit_softcapping"],
            }
        case "gemma4":
            return gemma4_keys(raw)
        case "falcon-h1":
            return {"embedding_scale": None}
        case "nemotron_h_moe":
            types, inner = raw["layers_block_type"], raw["mamba_num_heads"] * raw["mamba_head_dim"]
            sizes = {"mlp": raw["intermediate_size"], "moe": raw["moe_intermediate_size"]}
            heads = [raw["num_key_value_heads"] if kind == "full_attention" else 0 for kind in types]
            return {
                "block_count": len(types), "feed_forward_length": [sizes.get(kind, 0) for kind in types],
                "attention.head_count_kv": heads, "ssm.inner_size": inner,
            }  # fmt: skip
        case "kimi-linear":
            kinds = raw["layer_types"]
            return mla_keys(raw) | {
                "attention.head_count_kv": [int(kind == "full_attention") for kind in kinds],
                "attention.value_length": None, "expert_gating_func": 2,
                "leading_dense_block_count": raw["mlp_layer_types"].count("dense"),
            }  # fmt: skip
        case "deepseek2":
            scale = rope.get("mscale_all_dim")
            return mla_keys(raw) | {
                "attention.head_count_kv": 1, "rope.scaling.yarn_log_multiplier": scale and 0.1 * scale,
                "expert_gating_func": 1 if raw["model_type"] == "deepseek_v2" else 2,
                "leading_dense_block_count": raw.get("first_k_dense_replace") or raw["mlp_layer_types"].count("dense"),
            }  # fmt: skip
        case "minicpm3":
            size = raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"]
            return {
                "attention.key_length": size, "attention.value_length": None,
                "rope.dimension_count": raw["qk_rope_head_dim"],
            }  # fmt: skip
        case "mistral3":
            scale = rope["llama_4_scaling_beta"]
            return {
                "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
                "attention.temperature_scale": scale, "attention.sliding_window": None,
            }  # fmt: skip
    return {}


def gemma4_keys(raw: dict[str, Any]) -> dict[str, Any]:
    local, whole = raw["head_dim"], max(own["head_dim"] for own in raw["per_layer_config"].values())
    heads = raw["num_key_value_heads"]
    own = {int(i): layer.get("num_key_value_heads", heads) for i, layer in raw["per_layer_config"].items()}
    size, layers = raw["intermediate_size"], raw["num_hidden_layers"]
    wide = raw["use_double_wide_mlp"] and layers - raw["num_kv_shared_layers"]
    return {
        "attention.key_length": whole, "attention.value_length": whole,
        "attention.key_length_swa": local, "attention.value_length_swa": local,
        "attention.head_count_kv": [own.get(i, heads) for i in range(layers)] if len(set(own.values())) > 0 else heads,
        "rope.dimension_count": whole, "rope.dimension_count_swa": local,
        "feed_forward_length": [size * (1 + (i >= wide)) for i in range(layers)] if wide else size,
    }  # fmt: skip


def mla_keys(raw: dict[str, Any]) -> dict[str, Any]:
    rank, rotated = raw["kv_lora_rank"], raw["qk_rope_head_dim"]
    return {
        "attention.key_length": rank + rotated, "attention.value_length": rank, "rope.dimension_count": rotated,
        "attention.key_length_mla": raw["qk_nope_head_dim"] + rotated, "attention.value_length_mla": raw["v_head_dim"],
    }  # fmt: skip


def xielu_keys(tensors: dict[str, Tensor]) -> dict[str, list[float]]:
    """The parameters of activations, which are metadata."""
    found: dict[str, list[float]] = {}
    for name, value in sorted(tensors.items()):
        if ".act_fn." in name:
            found.setdefault(f"xielu.{name.rpartition('.')[2]}", []).append(value.item())
    return found


def rope_factors(raw: dict[str, Any]) -> dict[str, list[float]]:
    """What convert_hf_to_gguf.py makes of Llama 3's rule, and of Gemma 4's layers without a window."""
    rope = raw.get("rope_parameters") or {}
    if raw["model_type"] == "gemma4_text":
        pairs = max(own["head_dim"] for own in raw["per_layer_config"].values()) // 2
        rotated = int(pairs * rope["full_attention"]["partial_rotary_factor"])
        return {"rope_freqs.weight": [1.0] * rotated + [1e30] * (pairs - rotated)}
    if rope.get("rope_type") != "llama3":
        return {}
    dims = torch.arange(0, raw["head_dim"], 2) / raw["head_dim"]
    wavelengths = 2 * torch.pi * rope["rope_theta"] ** dims
    low, high = (rope["original_max_position_embeddings"] / rope[f"{end}_freq_factor"] for end in ("low", "high"))
    smooth = (rope["original_max_position_embeddings"] / wavelengths - rope["low_freq_factor"]) / (
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = torch.where(wavelengths < high, 1.0, torch.where(wavelengths > low, rope["factor"], between))
    return {"rope_freqs.weight": factors.tolist()}
