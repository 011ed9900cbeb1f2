"""Maps tensors of a GGUF file to the names and shapes that they have in a Hugging Face checkpoint."""

from __future__ import annotations

import math
import re

from msgspec.structs import replace

from engine.model.checkpoint.gguf import latent
from engine.model.checkpoint.gguf.entry import TYPES, Entry
from engine.model.checkpoint.gguf.families import family
from engine.model.checkpoint.gguf.keys import GGUFError, Keys, Metadata, head_counts, num_layers
from engine.model.checkpoint.gguf.recurrent import LinearHeads, ungrouped, untiled
from engine.model.checkpoint.gguf.source import GGUFSource

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
    "linear_attn.dt_proj", "mamba.in_proj", "mamba.D", "linear_attn.in_proj_ba",
    "mixer.fc1_latent_proj", "mixer.fc2_latent_proj", "self_attn.q_a_proj", "self_attn.q_a_layernorm",
    "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm", "self_attn.kv_b_proj",
    "self_attn.k_b_proj", "self_attn.v_b_proj", "self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d",
    "self_attn.f_a_proj", "self_attn.f_b_proj", "self_attn.g_a_proj", "self_attn.g_b_proj",
    "altup.correct_output_scale", "altup.correction_coefs", "altup.prediction_coefs", "altup.modality_router",
    "altup.router_norm", "laurel.linear_left", "laurel.linear_right", "laurel.post_laurel_norm",
    "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm", "layer_scalar",
    "mlp.experts.gate_up_proj", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
)  # fmt: skip
MODEL = (
    "model.embed_tokens", "model.norm", "model.embedding_norm", "lm_head", "model.embed_tokens_per_layer",
    "model.per_layer_model_projection", "model.per_layer_projection_norm", "model.altup_projections",
    "model.altup_unembed_projections",
)  # fmt: skip
BARE = ("sinks", "expert_bias", "layer_scalar", "altup.correct_output_scale")  # tensors without a suffix
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
FIRST_PART, SECOND_PART = ".first_part.weight", ".second_part.weight"  # of a layer (GGUFFamily.renamed)
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
LAYER_NAME = re.compile(r"blk\.(\d{1,9})\.(.+)")


def entries(source: GGUFSource) -> dict[str, Entry]:
    """Return the file's tensors by their names in a checkpoint. Raises GGUFError for a tensor without such a name."""
    metadata, tensors = source.metadata, source.tensors
    own, last = family(metadata), num_layers(metadata)
    heads = head_counts(metadata) if own.rotated_pairs else {}
    check_layers(metadata, tensors)
    linear = LinearHeads.read(metadata)
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
        whole = f"{path}.{suffix}." if suffix else f"{path}."
        for other, theirs in own.renamed.items():
            whole = whole.replace(other, theirs)
        path, _, suffix = whole.removesuffix(".").rpartition(".") if suffix else (whole.removesuffix("."), "", "")
        if path.endswith("norm") and not path.endswith("linear_attn.norm"):
            entry = replace(entry, added=own.norm_shift)
        last_name = path.rpartition(".")[2]
        if ".linear_attn." in path and (parts := ungrouped(last_name, entry, linear)) is not None:
            found |= {f"{path.removesuffix(last_name)}{part}.{suffix}": one for part, one in parts.items()}
            continue
        if own.tiled_heads and ".linear_attn." in path:
            entry = untiled(last_name, entry, linear)
        if last_name in heads:
            entry = replace(entry, pairs_of_heads=heads[last_name])
        found |= _placed(path, suffix, entry, own.alternating_experts)
    if strange:
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise GGUFError(f"its tensors {', '.join(sorted(strange)[:3])}{more} are not known in a {own.architecture}")
    if own.made is not None:
        found |= own.made(source)
    return _alternating(found) if own.alternating_experts else _joined(latent.joined(found))


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
        columns = entry.columns
        whole = entry.values is None and (columns is None or columns.in_blocks(TYPES[entry.type][0]) is not None)
        if entry.in_blocks and name.endswith(".weight") and whole:
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
        known = path.replace("model.", "backbone.", 1) if ".mixer." in path else path  # Nemotron's
        if (name := table.get_name(known)) is not None:
            found.setdefault(name, path)
    return found


def _placed(path: str, suffix: str, entry: Entry, stacked_experts: bool) -> dict[str, Entry]:
    """Return a tensor by its name in a checkpoint; one that holds all experts is cut into one entry per expert."""
    if path.endswith("e_score_correction"):
        return {f"{path}_{suffix}": entry}
    if path.endswith(BARE):
        return {path: entry}
    if path.endswith(".A_log") and len(entry.shape) == 4:  # Kimi Delta Attention's
        return {path: replace(entry, shape=(1, 1, math.prod(entry.shape), 1), negative_exp=True)}
    if path.endswith((".A_log", ".D")):
        return {path: replace(entry, shape=entry.shape[:1], negative_exp=path.endswith("A_log"))}
    if path.endswith("norm") and len(entry.shape) > 1:
        return {f"{path}.{suffix}": replace(entry, shape=(math.prod(entry.shape),))}
    if path.endswith("dt_proj"):
        return {f"{path.removesuffix('dt_proj')}dt_bias": entry}
    if path.endswith(("conv.conv", "conv1d")) and suffix == "weight":
        rows = math.prod(entry.shape[:-1])
        return {f"{path}.{suffix}": replace(entry, shape=(rows, 1, *entry.shape[-1:]))}
    if path.endswith("shared_expert_gate"):
        return {f"{path}.{suffix}": replace(entry, shape=(1, math.prod(entry.shape)))}
    if "altup_" in path:
        return {f"{path}.{i}.{suffix}": one for i, one in enumerate(_cut(path, entry))}
    before, _, projection = path.partition(".experts.")
    if not projection or stacked_experts:
        return {f"{path}.{suffix}": entry}
    halves = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    found: dict[str, Entry] = {}
    for i, one in enumerate(_cut(path, entry)):
        parts = _cut(path, replace(one, shape=(2, one.shape[0] // 2, *one.shape[1:]))) if len(halves) > 1 else [one]
        found |= {f"{before}.experts.{i}.{own}.{suffix}": part for own, part in zip(halves, parts, strict=True)}
    return found


def _cut(path: str, entry: Entry) -> list[Entry]:
    """Return what a tensor holds along its first dimension."""
    if len(entry.shape) < 2:
        raise GGUFError(f"its {path} must have a dimension more, got the shape {list(entry.shape)}")
    count, *shape = entry.shape
    one = replace(entry, shape=tuple(shape))
    return [replace(one, offset=one.offset + i * one.nbytes) for i in range(count)]


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
