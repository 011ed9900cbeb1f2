"""Writes tiny models of transformers as GGUF files, as llama.cpp's convert_hf_to_gguf.py does."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.model.tensor_names import canonical_name
from tests.gguf_keys import keys, rope_factors, xielu_keys

Numbers = NDArray[np.float32]
# Heads whose size and inputs are what blocks of 256 numbers need.
WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
    "num_attention_heads": 16,
}  # fmt: skip
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3",
    "glm4": "glm4", "glm4_moe": "glm4moe", "gpt_oss": "gpt-oss", "granite": "granite", "smollm3": "smollm3",
    "olmo2": "olmo2", "olmo3": "olmo2", "exaone4": "exaone4", "ernie4_5": "ernie4_5", "seed_oss": "seed_oss",
    "hunyuan_v1_dense": "hunyuan-dense", "lfm2": "lfm2", "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid", "gemma": "gemma", "arcee": "arcee", "cohere2": "cohere2",
    "starcoder2": "starcoder2", "gemma3n_text": "gemma3n", "gemma4_text": "gemma4", "falcon_h1": "falcon-h1",
    "nemotron_h": "nemotron_h_moe", "qwen3_next": "qwen3next", "kimi_linear": "kimi-linear",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm4_moe_lite": "deepseek2", "minicpm3": "minicpm3",
    "ministral3": "mistral3", "apertus": "apertus",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
}  # fmt: skip
RENAMED = {
    "e_score_correction_bias": "e_score_correction.bias",
    "mixer.dt_bias": "mixer.dt.bias", "dt_bias": "dt_proj.bias", "router.layer": "gate",
    "mixer.experts.": "mlp.experts.", "router.per_expert_scale": "mlp.experts.down_proj.scale",
    "router.scale": "mlp.gate.scale",
}  # fmt: skip
# of parameters without one, or that the tables of `gguf` know with it
SUFFIXES = {
    "sinks": ".weight", "expert_bias": ".bias", "A_log": ".", ".D": ".", "layer_scalar": ".weight",
    "correct_output_scale": ".weight", "pre_ff_layernorm.weight": ".weight",
}  # fmt: skip
MAMBA = ("mamba.A_log", "mamba.D", "mixer.A_log", "mixer.D")
SHIFTED = ("gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
PAIRS = ("llama", "granite", "smollm3", "arcee", "granitehybrid", "nemotron_h_moe", "mistral3")  # rotated
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
ALTUP = re.compile(r"(.*altup_\w+)\.(\d+)\.(.*)")
STACKED = re.compile(r".*(\.experts\.\w+\.(weight|bias)|altup_\w+\.weight|\.[kv]_b_proj\.weight)")
NOT_IN_BLOCKS = ("norm", "bias", "sinks", "ffn_gate_inp", "exp_probs_b", "rope_", "conv", "ssm_a", "scale")


def write_gguf(
    folder: Path, file: Path, type: str, others: Mapping[str, str] = MappingProxyType({}), **metadata: Any
) -> Path:
    """Write the model of a folder with its matrices in a type of ggml, and return a copy of the folder whose weights
    are the numbers that the file holds. others: types of tensors by a part of their names. metadata: more keys."""
    raw = json.loads((folder / "config.json").read_text())
    raw["head_dim"] = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    raw.setdefault("num_hidden_layers", len(raw.get("layers_block_type") or ()))
    tensors = {canonical_name(name): tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    writer = GGUFWriter(file, arch := ARCHITECTURES[raw["model_type"]])
    own_keys = keys(raw, arch) | xielu_keys(tensors)
    for key, value in (own_keys | {"general.name": "tiny"} | vocabulary(raw["vocab_size"]) | metadata).items():
        add(writer, key, value)
    table = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), 8)
    held: dict[str, Tensor] = {name: tensors.pop(name) for name in list(tensors) if ".act_fn." in name}
    for name, parts in gathered(tensors, raw).items():
        stem, _, suffix = name.rpartition(".")
        known_stem = stem.replace("model.", "backbone.", 1) if ".mixer." in stem else stem
        own = f"{table.get_name(known_stem)}.{suffix}".removesuffix(".")
        plain = (
            name.endswith(("sinks", "conv.conv.weight"))
            or parts[0][1].dim() == 1
            or any(word in own for word in NOT_IN_BLOCKS)
        )
        data = np.stack([arranged(n, t, raw).numpy() for n, t in parts])
        data = data if (stacked := bool(STACKED.fullmatch(name))) else data[0]
        kind = "F32" if plain else next((other for part, other in others.items() if part in own), type)
        if data.shape[-1] % gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]:  # it has no whole blocks
            plain, kind = True, "F32"
        stored, numbers = encoded(data, kind)
        writer.add_tensor(own, stored, raw_dtype=None if plain else GGMLQuantizationType[kind])
        numbers = numbers if stacked else numbers[None]
        for (part, _), values in zip(parts, torch.from_numpy(numbers), strict=True):
            held[part] = rearranged(part, values, raw)
    for name, factors in rope_factors(raw).items():
        writer.add_tensor(name, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    oracle = file.parent / f"{file.stem}-numbers"
    shutil.copytree(folder, oracle, dirs_exist_ok=True)
    names = {canonical_name(name): name for name in load_file(folder / "model.safetensors")}
    save_file({names[name]: tensor.contiguous() for name, tensor in ungathered(held, raw).items()},
              oracle / "model.safetensors", {"format": "pt"})  # fmt: skip
    return oracle


def vocabulary(size: int) -> dict[str, Any]:
    """Tokens of one byte, then whatever."""
    letters = [chr(ord("a") + i % 26) * (1 + i // 26) for i in range(size)]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": letters,
        "tokenizer.ggml.token_type": [1] * size, "tokenizer.ggml.merges": ["a a"], "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def gathered(tensors: dict[str, Tensor], raw: dict[str, Any]) -> dict[str, list[tuple[str, Tensor]]]:
    """Each tensor of the file, by its name as the tables know it, with those that it is made of."""
    found: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            path = match[1].removeprefix("model.") if raw["model_type"] == "lfm2_moe" else match[1]
            found.setdefault(known(f"{path}.{match[3]}"), []).append((name, tensor))
        elif match := ALTUP.fullmatch(name):
            found.setdefault(f"{match[1]}.{match[3]}", []).append((name, tensor))
        elif raw["model_type"] == "gemma4_text" and ".experts." in name:
            path = name.replace(".experts.", ".mlp.experts.")
            found[f"{path}.weight"] = [(f"{name}:whole:{i}", one) for i, one in enumerate(tensor)]
        elif name.endswith("kv_b_proj.weight") and raw["model_type"] != "minicpm3":
            path, heads = name.removesuffix("kv_b_proj.weight"), raw["num_attention_heads"]
            both = tensor.view(heads, -1, tensor.shape[-1]).split((raw["qk_nope_head_dim"], raw["v_head_dim"]), 1)
            for own, part in (("k", both[0].mT), ("v", both[1])):
                found[f"{path}{own}_b_proj.weight"] = [(f"{name}:{own}:{i}", one) for i, one in enumerate(part)]
        elif name.endswith("in_proj_qkvz.weight"):
            q, k, v, z = qkvz(raw, tensor)
            layer = name.removesuffix("linear_attn.in_proj_qkvz.weight")
            found[f"{layer}self_attn.qkv_proj.weight"] = [(f"{name}:qkv:0", torch.cat((q, k, v)))]
            found[f"{layer}linear_attn.in_proj_z.weight"] = [(f"{name}:z:0", z)]
        elif name.endswith("put_linear.weight"):
            layer, experts = name.rpartition(".")[0].rsplit(".", 2)[0], "shared_mlp" not in name
            shared = "mlp.shared_expert" if raw["num_local_experts"] else "mlp"
            mlp = f"{layer}.{'mlp.experts' if experts else shared}"
            parts = ("gate_proj", "up_proj") if "input" in name else ("down_proj",)
            for own, part in zip(parts, tensor.chunk(len(parts), -2), strict=True):
                ones = part if experts else [part]
                found[f"{mlp}.{own}.weight"] = [(f"{name}:{own}:{i}", one) for i, one in enumerate(ones)]
        elif raw["model_type"] == "gpt_oss" and ".experts." in name:
            path, _, projection = name.rpartition(".")
            kind = "bias" if projection.endswith("_bias") else "weight"
            outputs_first = tensor.mT if kind == "weight" else tensor
            halves = {"gate_proj": outputs_first[:, ::2], "up_proj": outputs_first[:, 1::2]}
            for own, part in halves.items() if "gate_up" in projection else [("down_proj", outputs_first)]:
                found[f"{path}.{own}.{kind}"] = [(f"{name}:{own}:{i}", one) for i, one in enumerate(part)]
        else:
            found[known(name)] = [(name, tensor)]
    return found


def qkvz(raw: dict[str, Any], tensor: Tensor) -> list[Tensor]:
    """The parts of a projection of Qwen3-Next's linear attention, whose rows are grouped by key head."""
    heads, size = raw["linear_num_key_heads"], raw["linear_key_head_dim"]
    values = raw["linear_num_value_heads"] // heads * raw["linear_value_head_dim"]
    groups = tensor.view(heads, -1, tensor.shape[-1]).split((size, size, values, values), 1)
    return [part.flatten(0, 1) for part in groups]


def known(name: str) -> str:
    """The name by which the tables of `gguf` know a tensor, with a suffix."""
    for part, other in RENAMED.items():
        name = name.replace(part, other)
    return name + next((suffix for end, suffix in SUFFIXES.items() if name.endswith(end)), "")


def ungathered(held: dict[str, Tensor], raw: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a checkpoint from what `gathered` made of them."""
    found = {name: tensor for name, tensor in held.items() if ":" not in name}
    for name in {name.partition(":")[0] for name in held if ":" in name}:

        def part(own: str, name: str = name) -> Tensor:
            return torch.stack([tensor for key, tensor in held.items() if key.startswith(f"{name}:{own}:")])

        if name.endswith("kv_b_proj.weight"):
            found[name] = torch.cat((part("k").mT, part("v")), 1).flatten(0, 1)
            continue
        if name.endswith("in_proj_qkvz.weight"):
            heads, size = raw["linear_num_key_heads"], raw["linear_key_head_dim"]
            sizes = heads * size, heads * size, len(part("z")[0])
            parts = [one.unflatten(0, (heads, -1)) for one in (*part("qkv")[0].split(sizes), part("z")[0])]
            found[name] = torch.cat(parts, 1).flatten(0, 1)
            continue
        if any(key.startswith(f"{name}:whole:") for key in held):
            found[name] = part("whole")
            continue
        if name.endswith("put_linear.weight"):
            both = torch.cat((part("gate_proj"), part("up_proj")), -2) if "input" in name else part("down_proj")
            found[name] = both if "shared_mlp" not in name else both[0]
            continue
        if "gate_up" in name:
            whole = torch.stack((part("gate_proj"), part("up_proj")), 2).flatten(1, 2)
        else:
            whole = part("down_proj")
        found[name] = whole if name.endswith("_bias") else whole.mT
    return found


def arranged(name: str, tensor: Tensor, raw: dict[str, Any]) -> Tensor:
    """A tensor of a checkpoint as llama.cpp stores it."""
    if heads := rotated_heads(name, raw):
        return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        tensor = tensor.squeeze(1) if raw["model_type"] != "kimi_linear" else tensor[None]
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if name.endswith(MAMBA):
        return tensor[:, None]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return tensor.view(raw.get("mamba_n_groups") or raw["n_groups"], -1)
    if ".linear_attn." in name and raw["model_type"] != "qwen3_next":
        return value_heads(name, tensor, raw, tiled=True)
    return tensor + 1 if shifted(name, raw) else tensor


def rearranged(name: str, tensor: Tensor, raw: dict[str, Any]) -> Tensor:
    if heads := rotated_heads(name, raw):
        return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    if name.endswith("A_log"):
        tensor = (-tensor).log()
    if name.endswith((*MAMBA, "mamba.norm.weight", "mixer.norm.weight")):
        return tensor.flatten()
    if ".linear_attn." in name and raw["model_type"] != "qwen3_next":
        tensor = value_heads(name, tensor, raw, tiled=False)
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        return tensor.unsqueeze(1) if raw["model_type"] != "kimi_linear" else tensor[0]
    return tensor - 1 if shifted(name, raw) else tensor


def shifted(name: str, raw: dict[str, Any]) -> bool:
    norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return norm and raw["model_type"] in (
        "gemma",
        "gemma2",
        "gemma3_text",
        "qwen3_next",
        "qwen3_5_text",
        "qwen3_5_moe_text",
    )


def value_heads(name: str, tensor: Tensor, raw: dict[str, Any], tiled: bool) -> Tensor:
    """Value heads of linear attention, those of one key head side by side, or tiled: those of all key heads."""
    keys = raw["linear_num_key_heads"]
    each = raw["linear_num_value_heads"] // keys
    if name.endswith("norm.weight"):
        return tensor
    if "out_proj" in name:
        tensor = tensor.T
    before = 2 * keys * raw["linear_key_head_dim"] if "in_proj_qkv" in name or "conv1d" in name else 0
    heads = tensor[before:].view(*((keys, each) if tiled else (each, keys)), -1, *tensor.shape[1:])
    found = torch.cat((tensor[:before], heads.transpose(0, 1).reshape(tensor[before:].shape)))
    return found.T.contiguous() if "out_proj" in name else found


def rotated_heads(name: str, raw: dict[str, Any]) -> int:
    if ARCHITECTURES[raw["model_type"]] not in PAIRS:
        return 0
    counts = {"q_proj": raw["num_attention_heads"], "k_proj": raw["num_key_value_heads"]}
    return next((count for part, count in counts.items() if f".{part}." in name), 0)


def encoded(data: NDArray[Any], type: str) -> tuple[NDArray[Any], Numbers]:
    """What is stored for some numbers, and the numbers that it stands for."""
    kind = GGMLQuantizationType[type]
    if type in ("F32", "F16"):
        stored = data.astype(np.float32 if type == "F32" else np.float16)
        return stored, stored.astype(np.float32)
    try:
        stored = gguf.quants.quantize(data.astype(np.float32), kind)
    except NotImplementedError:  # of the K types `gguf` only reads: any block of one is as good
        stored = random_blocks(data, kind)
    return stored, gguf.quants.dequantize(stored, kind)


# Bytes of the scales and minima of random blocks, with a factor, and the deviation of their numbers for a scale of 1.
HALVES: dict[GGMLQuantizationType, tuple[dict[int, float], float]] = {
    GGMLQuantizationType.Q6_K: ({208: 1.0}, 19 * 74),  # numbers of six bits times scales of eight
    GGMLQuantizationType.Q3_K: ({108: 1.0}, 2.3 * 18.5),
    GGMLQuantizationType.Q2_K: ({80: 1.0, 82: 1.5}, 13),
    GGMLQuantizationType.IQ4_NL: ({0: 1.0}, 70),
    GGMLQuantizationType.IQ4_XS: ({0: 1.0}, 70 * 18.5),
}


def random_blocks(data: NDArray[Any], kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    """Blocks whose numbers are about as large as those of `data`, around 0."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(data.size)
    blocks = rng.integers(0, 256, (*data.shape[:-1], data.shape[-1] // numbers, size), dtype=np.uint8)
    if kind in HALVES:
        scales, deviation = HALVES[kind]
    else:
        values = 16 if kind == GGMLQuantizationType.Q4_K else 32
        scales, deviation = {0: 1.0, 2: values / 2}, 32 * values / 3.5
        blocks[..., 8:12] = blocks[..., 4:8]  # minima like scales, which takes numbers to both sides of 0
        blocks[..., 12:16] = blocks[..., 12:16] & 15 | blocks[..., 12:16] << 4
    for at, factor in scales.items():
        half = np.full((*blocks.shape[:-1], 1), factor * data.std() / deviation, np.float16)
        blocks[..., at : at + 2] = half.view(np.uint8)
    return blocks.reshape(*data.shape[:-1], -1)
