"""Recurrent layers of GGUF files: their fields in config.json, and the order of their heads' rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from msgspec.structs import replace

from engine.model.checkpoint.gguf import experts
from engine.model.checkpoint.gguf.entry import Entry, Runs
from engine.model.checkpoint.gguf.keys import Fields, GGUFError, Keys, Metadata, num_layers
from engine.model.checkpoint.gguf.source import GGUFSource


@dataclass(frozen=True, slots=True)
class LinearHeads:
    """The heads of linear attention; one of them where a model has none."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    @classmethod
    def read(cls, metadata: Metadata) -> LinearHeads:
        keys = Keys(metadata)
        key_heads, value_heads = keys.size("ssm.group_count", 1), keys.size("ssm.time_step_rank", 1)
        if value_heads % key_heads:
            raise GGUFError(
                f"{keys.prefix}.ssm.time_step_rank = {value_heads} must be a multiple of {key_heads} key heads"
            )
        inner = keys.size("ssm.inner_size", value_heads)
        return cls(key_heads, value_heads, keys.size("ssm.state_size", 1), inner // value_heads)

    @property
    def share(self) -> int:
        """The number of value heads of a key head."""
        return self.value_heads // self.key_heads


def linear_attention(source: GGUFSource) -> Fields:
    return {"linear_value_head_dim": LinearHeads.read(source.metadata).value_size}


def short_convolutions(source: GGUFSource) -> Fields:
    return {"layer_types": _layer_types(source, "conv")}


def granite(source: GGUFSource) -> Fields:
    keys = source.keys
    inner, heads = keys.size("ssm.inner_size"), keys.size("ssm.time_step_rank")
    return {
        "layer_types": _layer_types(source, "linear_attention"),
        "mamba_expand": inner // keys.size("embedding_length"), "mamba_d_head": inner // heads,
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned") else None,
        "num_local_experts": keys.size("expert_count", 0), "num_experts_per_tok": keys.size("expert_used_count", 0),
        "shared_intermediate_size": keys.size(
            "expert_shared_feed_forward_length", keys.size("feed_forward_length")
        ),
    }  # fmt: skip


def falcon_h1(source: GGUFSource) -> Fields:
    """Return the fields of Falcon-H1. Its factors are in the file's weights."""
    keys, parts = source.keys, source.parts
    inner, heads = keys.size("ssm.inner_size"), keys.size("ssm.time_step_rank")
    return {
        "mamba_d_ssm": inner, "mamba_d_head": inner // heads, "mamba_conv_bias": "ssm_conv1d.bias" in parts,
        "mamba_rms_norm": "ssm_norm.weight" in parts, "mamba_norm_before_gate": False,
        "projectors_bias": "ssm_out.bias" in parts, "mamba_proj_bias": "ssm_in.bias" in parts,
        "mlp_bias": "ffn_down.bias" in parts,
    }  # fmt: skip


def nemotron_h(source: GGUFSource) -> Fields:
    keys, parts = source.keys, source.parts
    heads = LinearHeads.read(source.metadata)
    kinds = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    types = []
    for layer in range(num_layers(source.metadata)):
        found = [kind for part, kind in kinds.items() if f"blk.{layer}.{part}.weight" in source.tensors]
        if len(found) != 1:
            raise GGUFError(f"its layer {layer} must be one of {', '.join(kinds.values())}, got {found}")
        types += found
    fields: Fields = {
        "layers_block_type": types, "mamba_head_dim": heads.value_size, "use_conv_bias": "ssm_conv1d.bias" in parts,
        "intermediate_size": max(keys.sizes("feed_forward_length", 0)), "use_bias": "ssm_in.bias" in parts,
        "mlp_bias": "ffn_down.bias" in parts, "mlp_hidden_act": "relu2",
    }  # fmt: skip
    if "moe" not in types:
        return fields
    experts.check_gating(keys, experts.SIGMOID)
    return fields | experts.deepseek(source, normed=True) | {
        "first_k_dense_replace": None,
        "moe_shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
        "moe_latent_size": keys.size("moe_latent_size", 0) or None,
    }  # fmt: skip


def kimi_linear(source: GGUFSource) -> Fields:
    keys, types = source.keys, _layer_types(source, "linear_attention")
    experts.check_gating(keys, experts.SIGMOID)
    found = experts.deepseek(source, normed=True)
    attention = [i for i, kind in enumerate(types, 1) if kind == "full_attention"]
    return {
        "linear_attn_config": {
            "full_attn_layers": attention, "kda_layers": [i for i in range(1, len(types) + 1) if i not in attention],
            "num_heads": source.shape("ssm_beta.weight")[0], "head_dim": keys.size("kda.head_dim"),
            "short_conv_kernel_size": keys.size("ssm.conv_kernel"),
        },
        "model_max_length": keys.size("context_length"),
        "num_experts": found["n_routed_experts"], "num_experts_per_token": found["num_experts_per_tok"],
        "moe_intermediate_size": found["moe_intermediate_size"], "num_shared_experts": found["n_shared_experts"],
        "first_k_dense_replace": found["first_k_dense_replace"], "moe_renormalize": found["norm_topk_prob"],
        "routed_scaling_factor": found["routed_scaling_factor"], "num_expert_group": found["n_group"],
        "topk_group": found["topk_group"],
    }  # fmt: skip


def _layer_types(source: GGUFSource, other: str) -> list[str]:
    """Return the type of each layer. Layers without KV heads are of the type `other`."""
    return ["full_attention" if count else other for count in source.keys.sizes("attention.head_count_kv")]


def untiled(name: str, entry: Entry, heads: LinearHeads) -> Entry:
    """Return a tensor of Qwen 3.5's linear attention with its value heads in the checkpoint's order: llama.cpp stores
    those of different key heads side by side, as its products repeat the key heads."""
    if heads.share == 1 or name == "norm":
        return entry
    before = 2 * heads.key_heads * heads.key_size if name in ("in_proj_qkv", "conv1d") else 0
    size = 1 if name in ("in_proj_a", "in_proj_b", "A_log", "dt_proj") else heads.value_size
    _check(name, entry.shape[-1 if name == "out_proj" else 0], before + heads.value_heads * size)
    places = [(before + (place * heads.key_heads + key) * size, size) for key in range(heads.key_heads)
              for place in range(heads.share)]  # fmt: skip
    runs = Runs(((0, before), *places) if before else tuple(places))
    return replace(entry, columns=runs) if name == "out_proj" else replace(entry, rows=runs)


def ungrouped(name: str, entry: Entry, heads: LinearHeads) -> dict[str, Entry] | None:
    """Return the parts of a projection of Qwen3-Next's linear attention, whose rows are grouped by key head; None for
    another tensor. Only older files have `in_proj_qkvz`."""
    value = heads.share * heads.value_size
    if name == "in_proj_ba":
        return _parts(name, entry, heads, (heads.share, heads.share), {"in_proj_b": (0,), "in_proj_a": (1,)})
    if name == "in_proj_qkvz":
        widths = heads.key_size, heads.key_size, value, value
        return _parts(name, entry, heads, widths, {"in_proj_qkv": (0, 1, 2), "in_proj_z": (3,)})
    return None


def _parts(
    name: str, entry: Entry, heads: LinearHeads, widths: Sequence[int], wanted: dict[str, Iterable[int]]
) -> dict[str, Entry]:
    group, starts = sum(widths), [0, *accumulate(widths)]
    _check(name, entry.shape[0], heads.key_heads * group)
    return {
        own: replace(entry, rows=Runs(tuple(
            (key * group + starts[part], widths[part]) for part in parts for key in range(heads.key_heads)
        )))
        for own, parts in wanted.items()
    }  # fmt: skip


def _check(name: str, found: int, expected: int) -> None:
    if found != expected:
        raise GGUFError(f"its tensors linear_attn.{name} must have {expected} numbers by the file's heads, got {found}")
