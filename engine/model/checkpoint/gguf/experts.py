"""Fields of config.json about experts, which families name in different ways."""

from __future__ import annotations

from engine.model.checkpoint.gguf.keys import Fields, GGUFError, Keys
from engine.model.checkpoint.gguf.source import GGUFSource

SOFTMAX, SIGMOID = 1, 2  # values of `expert_gating_func`


def common(source: GGUFSource) -> Fields:
    """Return the fields of Qwen's families and of those like them; none for a file without experts."""
    keys = source.keys
    if not keys.size("expert_count", 0):
        return {}
    layers = range(keys.size("block_count"))
    return {
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": _size(keys),
        "mlp_only_layers": [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in source.tensors],
        "num_experts": keys.size("expert_count"),
    }


def with_shared_expert(source: GGUFSource) -> Fields:
    shared = source.keys.size("expert_shared_feed_forward_length", 0)
    return common(source) | {"shared_expert_intermediate_size": shared}


def mixtral(source: GGUFSource) -> Fields:
    keys = source.keys
    return {"num_local_experts": keys.size("expert_count"), "num_experts_per_tok": keys.size("expert_used_count")}


def gpt_oss(source: GGUFSource) -> Fields:
    size = _size(source.keys)
    return mixtral(source) | {"moe_intermediate_size": size, "intermediate_size": size}


def lfm2(source: GGUFSource) -> Fields:
    keys = source.keys
    check_gating(keys, SIGMOID)
    return {
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": _size(keys),
        "num_dense_layers": keys.size("leading_dense_block_count", 0),
    }


def glm(source: GGUFSource) -> Fields:
    check_gating(source.keys, SIGMOID)
    return deepseek(source, normed=True) | {
        "use_qk_norm": "attn_q_norm.weight" in source.parts,
        "num_nextn_predict_layers": source.keys.size("nextn_predict_layers", 0),
    }


def deepseek(source: GGUFSource, normed: bool = False) -> Fields:
    """Return the fields of DeepSeek's families and of those like them. normed: whether the weights of a token's experts
    sum to 1 if the file does not say."""
    keys = source.keys
    return {
        "n_routed_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": _size(keys),
        "n_shared_experts": keys.size("expert_shared_count", 1),
        "first_k_dense_replace": keys.size("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", normed)),
        "n_group": keys.size("expert_group_count", 1),
        "topk_group": keys.size("expert_group_used_count", 1),
    }


def check_gating(keys: Keys, supported: int) -> None:
    """Raise GGUFError if the file names another function of the router."""
    if (found := keys.size("expert_gating_func", supported)) != supported:
        raise GGUFError(f"{keys.prefix}.expert_gating_func = {found} is not supported: must be {supported}")


def _size(keys: Keys) -> int:
    return keys.size("expert_feed_forward_length", 0) or keys.size("feed_forward_length")
