"""Maps tensors of a GGUF file to the names and shapes that they have in a Hugging Face checkpoint."""

from __future__ import annotations

import math
import re

from msgspec.structs import replace

from engine.model.checkpoint.gguf.config import (
    GGUFError,
    Keys,
    LinearHeads,
    Metadata,
    family,
    head_counts,
    linear_heads,
    num_layers,
)
from engine.model.checkpoint.gguf.entry import TYPES, Entry, Tiles

# Modules of Hugging Face's models that the tables of the package `gguf` know. If two have the same name in a file, the
# first is used, and `Family.renamed` replaces it where a family has the second.
LAYER = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    "post_self_attn_layernorm", "post_mlp_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.qkv_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "self_attn.sinks",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate", "mlp.gate.e_score_correction",
    "mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj", "mlp.shared_expert.gate_proj",
    "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj", "mlp.shared_expert_gate", "conv.conv", "conv.in_proj",
    "conv.out_proj", "linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_a",
    "linear_attn.in_proj_b", "linear_attn.conv1d", "linear_attn.norm", "linear_attn.out_proj", "linear_attn.A_log",
    "linear_attn.dt_proj", "mamba.in_proj", "mamba.D",
)  # fmt: skip
MODEL = ("model.embed_tokens", "model.norm", "model.embedding_norm", "lm_head")
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
FIRST_PART, SECOND_PART = ".first_part.weight", ".second_part.weight"  # of a layer (GGUFFamily.renamed)
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
LAYER_NAME = re.compile(r"blk\.(\d{1,9})\.(.+)")


def entries(metadata: Metadata, tensors: dict[str, Entry]) -> dict[str, Entry]:
    """Return the file's tensors by their names in a checkpoint. Raises GGUFError for a tensor without such a name."""
    own, last, heads = family(metadata), num_layers(metadata), head_counts(metadata)
    check_layers(metadata, tensors)
    linear = linear_heads(metadata)
    paths, strange = _paths(metadata), []
    found: dict[str, Entry] = {}
    for name, entry in tensors.items():
        stem, _, suffix = (name, "", "") if name in paths else name.rpartition(".")
        layer = LAYER_NAME.match(name)
        if name in ROPE_FACTORS or (layer and (int(layer[1]) >= last or layer[2] in ROPE_FACTORS)):
            continue  # layers that predict further tokens, and factors that are in config.json
        if (path := paths.get(stem)) is None:
            strange.append(name)
            continue
        for other, theirs in own.renamed.items():
            path = f"{path}.".replace(other, theirs).removesuffix(".")
        if path.endswith("norm") and not path.endswith("linear_attn.norm"):
            entry = replace(entry, added=own.norm_shift)
        if ".linear_attn." in path:
            entry = _untiled(path.rpartition(".")[2], entry, linear)
        if own.rotated_pairs:
            entry = replace(entry, pairs_of_heads=heads.get(path.rpartition(".")[2], 0))
        found |= _placed(path, suffix, entry, own.alternating_experts)
    if strange:
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise GGUFError(f"its tensors {', '.join(sorted(strange)[:3])}{more} are not known in a {own.architecture}")
    return _alternating(found) if own.alternating_experts else _joined(found)


def check_layers(metadata: Metadata, tensors: dict[str, Entry]) -> None:
    """Raise GGUFError unless the file has tensors of each layer, and of none above the last."""
    count, last = Keys(metadata).size("block_count"), num_layers(metadata)
    numbers = {int(layer[1]) for name in tensors if (layer := LAYER_NAME.match(name))}
    for has, wrong in (("tensors", [n for n in numbers if n >= count]), ("no tensors", set(range(last)) - numbers)):
        if wrong:
            told = f"{metadata['general.architecture']}.block_count = {count}"
            raise GGUFError(f"it has {has} of layer {min(wrong)}, but {told}")


def types(found: dict[str, Entry]) -> dict[str, str]:
    """Return the types of weights that are stored in blocks, by the name of their layer in a checkpoint."""
    named: dict[str, str] = {}
    for name, entry in found.items():
        cut = entry.tiled_columns is not None and entry.tiled_columns.size % TYPES[entry.type][0]  # blocks of two heads
        if entry.in_blocks and name.endswith(".weight") and not cut:
            path, _, layer = name.removesuffix(".weight").rpartition(".")
            named |= {f"{path}.{part}": entry.type for part in MERGED.get(layer, (layer,))}
    return named


def _paths(metadata: Metadata) -> dict[str, str]:
    """Return each module's path in a checkpoint, by its path in the file, from the tables of `gguf`."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == metadata["general.architecture"])
    count = num_layers(metadata)
    table = get_tensor_name_map(arch, count)
    paths = [*MODEL, *(f"model.layers.{i}.{name}" for i in range(count) for name in LAYER)]
    found: dict[str, str] = {}
    for path in paths:
        if (name := table.get_name(path)) is not None:
            found.setdefault(name, path)
    return found


def _untiled(name: str, entry: Entry, heads: LinearHeads) -> Entry:
    """Return a tensor of linear attention with the tiles of its value heads."""
    each = heads.value_heads // heads.key_heads
    if each == 1 or name == "norm":
        return entry
    before = 2 * heads.key_heads * heads.key_size if name in ("in_proj_qkv", "conv1d") else 0
    size = 1 if name in ("in_proj_a", "in_proj_b", "A_log", "dt_proj") else heads.value_size
    tiles = Tiles(heads.key_heads, each, size, before)
    if (found := entry.shape[-1 if name == "out_proj" else 0]) != tiles.end:
        raise GGUFError(
            f"its tensors linear_attn.{name} must have {tiles.end} numbers by the file's heads, got {found}"
        )
    return replace(entry, tiled_columns=tiles) if name == "out_proj" else replace(entry, tiled_rows=tiles)


def _placed(path: str, suffix: str, entry: Entry, stacked_experts: bool) -> dict[str, Entry]:
    """Return a tensor by its name in a checkpoint; one that holds all experts is cut into one entry per expert."""
    if path.endswith("e_score_correction"):
        return {f"{path}_{suffix}": entry}
    if path.endswith(("sinks", "expert_bias")):
        return {path: entry}
    if path.endswith(("A_log", "mamba.D")):
        return {path: replace(entry, shape=entry.shape[:1], negative_exp=path.endswith("A_log"))}
    if path.endswith("mamba.norm"):
        return {f"{path}.{suffix}": replace(entry, shape=(math.prod(entry.shape),))}
    if path.endswith("dt_proj"):
        return {f"{path.removesuffix('dt_proj')}dt_bias": entry}
    if path.endswith(("conv.conv", "conv1d")) and suffix == "weight":
        return {f"{path}.{suffix}": replace(entry, shape=(entry.shape[0], 1, *entry.shape[1:]))}
    if path.endswith("shared_expert_gate"):
        return {f"{path}.{suffix}": replace(entry, shape=(1, math.prod(entry.shape)))}
    before, _, projection = path.partition(".experts.")
    if not projection or stacked_experts:
        return {f"{path}.{suffix}": entry}
    if len(entry.shape) < 2:
        raise GGUFError(f"its experts {path} must have a dimension of experts, got the shape {list(entry.shape)}")
    count, *shape = entry.shape
    one = replace(entry, shape=tuple(shape))
    name = f"{projection}.{suffix}"
    return {f"{before}.experts.{i}.{name}": replace(one, offset=one.offset + i * one.nbytes) for i in range(count)}


def _joined(found: dict[str, Entry]) -> dict[str, Entry]:
    """Return the tensors with the two parts of each layer that the checkpoint stores as one joined."""
    joined: dict[str, Entry] = {}
    for name, entry in found.items():
        if name.endswith(SECOND_PART):
            first = found.get(f"{name.removesuffix(SECOND_PART)}{FIRST_PART}")
            if first is None or (first.shape, first.type, first.file) != (entry.shape, entry.type, entry.file):
                raise GGUFError(f"its parts of {name.removesuffix(SECOND_PART)} differ in shape, type or file")
            joined[f"{name.removesuffix(SECOND_PART)}.weight"] = replace(first, joined=entry.offset)
        elif not name.endswith(FIRST_PART):
            joined[name] = entry
    return joined


def _alternating(found: dict[str, Entry]) -> dict[str, Entry]:
    """Return the tensors with experts stored as in gpt-oss: rows of gate and up alternate, and the dimension of inputs
    comes before that of outputs."""
    arranged: dict[str, Entry] = {}
    for name, entry in found.items():
        path, _, projection = name.partition(".experts.")
        own = {"weight": "", "bias": "_bias"}.get(projection.rpartition(".")[2], "")
        entry = replace(entry, transposed=len(entry.shape) == 3)
        match projection.partition(".")[0]:
            case "":
                arranged[name] = entry
            case "gate_proj":
                up = found[name.replace("gate_proj", "up_proj")]
                arranged[f"{path}.experts.gate_up_proj{own}"] = replace(entry, alternate=up.offset)
            case "down_proj":
                arranged[f"{path}.experts.down_proj{own}"] = entry
    return arranged
