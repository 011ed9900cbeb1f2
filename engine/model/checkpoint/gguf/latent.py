"""Latent attention of GGUF files: its fields in config.json, and its projection to keys and values."""

from __future__ import annotations

from msgspec.structs import replace

from engine.model.checkpoint.gguf import experts
from engine.model.checkpoint.gguf.entry import Entry
from engine.model.checkpoint.gguf.keys import Fields, GGUFError
from engine.model.checkpoint.gguf.source import GGUFSource

KEYS, VALUES, BOTH = ".k_b_proj.weight", ".v_b_proj.weight", ".kv_b_proj.weight"


def heads(source: GGUFSource) -> Fields:
    """Return the sizes of heads. Newer files state those of a head as it is computed under `key_length_mla`, and those
    of the cached vector under `key_length`."""
    keys, count = source.keys, source.keys.size("attention.head_count")
    rotated, rank = keys.size("rope.dimension_count"), keys.size("attention.kv_lora_rank")
    key = keys.size("attention.key_length_mla", keys.size("attention.key_length"))
    if key <= rotated:
        raise GGUFError(f"{keys.prefix}.attention.key_length = {key} must be above rope.dimension_count ({rotated})")
    return {
        "num_attention_heads": count,
        "num_key_value_heads": count,
        "kv_lora_rank": rank,
        "q_lora_rank": keys.size("attention.q_lora_rank") if "attn_q_a.weight" in source.parts else None,
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": _value_size(source, count, key - rotated),
    }


def _value_size(source: GGUFSource, count: int, nope: int) -> int:
    """Return the size of a head's value, which MiniCPM 3's files do not state."""
    keys = source.keys
    stated = keys.get("attention.value_length_mla") or keys.get("attention.value_length")
    if stated is not None:
        return keys.size("attention.value_length_mla", keys.size("attention.value_length", 1))
    rows = source.shape("attn_kv_b.weight")[0]
    if rows % count or rows // count <= nope:
        raise GGUFError(f"its tensors attn_kv_b.weight must have rows for {count} heads, got {rows}")
    return rows // count - nope


def deepseek(source: GGUFSource) -> Fields:
    keys = source.keys
    if not keys.size("expert_count", 0):
        raise GGUFError(f"it has no {keys.prefix}.expert_count: latent attention without experts is not supported")
    fields = heads(source) | experts.deepseek(source)
    gating = keys.size("expert_gating_func", 0) or experts.SOFTMAX
    if gating == experts.SIGMOID:
        return fields
    if gating != experts.SOFTMAX:
        raise GGUFError(f"{keys.prefix}.expert_gating_func = {gating} is not supported: must be 1 or 2")
    return fields | {"topk_method": "group_limited_greedy" if fields["n_group"] > 1 else "greedy"}


def joined(found: dict[str, Entry]) -> dict[str, Entry]:
    """Return the tensors with those that project to a head's keys and to its values as the one of the checkpoint. The
    former are stored transposed: [heads, rank, size of a key]."""
    whole = {name: entry for name, entry in found.items() if not name.endswith((KEYS, VALUES))}
    for name, keys in found.items():
        if not name.endswith(KEYS):
            continue
        values = found.get(name.replace(KEYS, VALUES))
        if values is None or len(keys.shape) != 3 or len(values.shape) != 3:
            raise GGUFError(f"its {name} must have three dimensions, and values beside it")
        if (keys.shape[0], keys.shape[1]) != (values.shape[0], values.shape[2]):
            raise GGUFError(f"its {name} has the shape {list(keys.shape)}, its values {list(values.shape)}")
        whole[name.replace(KEYS, BOTH)] = replace(keys, values=values)
    return whole
