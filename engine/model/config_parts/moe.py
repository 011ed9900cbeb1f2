"""Reads a model's mixture of experts from config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.model.checkpoint.fields import Fields, Unsupported, one_of

MLPS = ("dense", "sparse")
TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc", None)
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # gpt-oss's values; others are refused


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Options of a mixture of experts."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool
    layers: frozenset[int]
    """Layers with experts; the others have an ordinary MLP."""
    scoring: Literal["softmax", "sigmoid", "group_limited"] = "softmax"
    """The router: `sigmoid` is DeepSeek V3's, `group_limited` DeepSeek V2's. Both have the next three fields."""
    num_groups: int = 1
    topk_groups: int = 1
    routed_scaling_factor: float = 1.0
    router_bias: bool = False
    zero_experts: int = 0
    """Further experts, which return their input."""
    latent_size: int = 0
    """Input and output size of routed experts, if it is less than the hidden size; else 0."""
    shared_intermediate_size: int = 0
    """Intermediate size of the shared expert, or of all shared experts together; 0 for none."""
    shared_name: str = "shared_expert"
    """Name of the shared expert in the checkpoint."""
    shared_gate: bool = False
    """Whether the shared expert's output is scaled by a sigmoid gate, one number per token."""

    @classmethod
    def read(cls, raw: Fields, num_layers: int) -> MoEConfig | None:
        num_experts = raw.get("num_experts") or raw.get("num_local_experts") or raw.get("n_routed_experts")
        if not num_experts:
            return None
        step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
        first, kinds = raw.get("first_k_dense_replace", 0), raw.get("mlp_layer_types")
        if kinds:  # each layer's type
            if len(kinds) < num_layers:
                raise Unsupported("mlp_layer_types", kinds, f"a list of {num_layers}, one for each layer")
            first, dense = 0, [i for i, kind in enumerate(kinds) if one_of("mlp_layer_types", kind, MLPS) == "dense"]
        size = raw["moe_intermediate_size"] if "moe_intermediate_size" in raw else raw["intermediate_size"]
        gated = "shared_expert_intermediate_size" in raw
        shared = raw.get("shared_expert_intermediate_size") or size * (raw.get("n_shared_experts") or 0)
        one_of("swiglu_limit", raw.get("swiglu_limit", SWIGLU_LIMIT), (SWIGLU_LIMIT,))
        one_of("swiglu_alpha", raw.get("swiglu_alpha", SWIGLU_ALPHA), (SWIGLU_ALPHA,))
        groups = raw.get("n_group") or 1
        if one_of("topk_method", raw.get("topk_method"), TOPK_METHODS) == "greedy":
            groups = 1
        if groups != 1 and (num_experts % groups or num_experts == groups):
            # a group is scored by its two best experts, so it must have two
            raise Unsupported("n_group", groups)
        if (per_token := raw["num_experts_per_tok"]) is None or per_token > num_experts:
            raise Unsupported("num_experts_per_tok", per_token, f"from 1 to the number of experts ({num_experts})")
        return cls(
            num_experts=num_experts,
            experts_per_token=per_token,
            intermediate_size=size,
            norm_topk_prob=raw.get("norm_topk_prob", False),
            layers=frozenset(i for i in range(first, num_layers) if (i + 1) % step == 0 and i not in dense),
            scoring=raw.get("scoring", "softmax"),
            num_groups=groups,
            topk_groups=raw.get("topk_group") or 1,
            routed_scaling_factor=raw.get("routed_scaling_factor") or 1.0,
            router_bias=raw.get("router_bias", False),
            zero_experts=raw.get("zero_expert_num") or 0,
            shared_intermediate_size=shared,
            latent_size=raw.get("moe_latent_size") or 0,
            shared_name=raw.get("shared_name") or ("shared_expert" if gated else "shared_experts"),
            shared_gate=raw.get("shared_gate", gated),
        )
