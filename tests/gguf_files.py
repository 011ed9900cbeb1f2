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
    "starcoder2": "starcoder2",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
}  # fmt: skip
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
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
RENAMED = {
    "e_score_correction_bias": "e_score_correction.bias", "dt_bias": "dt_proj.bias", "router.layer": "gate",
}  # fmt: skip
SUFFIXES = {"sinks": ".weight", "expert_bias": ".bias", "A_log": ".", "mamba.D": "."}  # of parameters without one
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
NOT_IN_BLOCKS = ("norm", "bias", "sinks", "ffn_gate_inp", "exp_probs_b", "rope_", "conv")


def write_gguf(
    folder: Path, file: Path, type: str, others: Mapping[str, str] = MappingProxyType({}), **metadata: Any
) -> Path:
    """Write the model of a folder with its matrices in a type of ggml, and return a copy of the folder whose weights
    are the numbers that the file holds. others: types of tensors by a part of their names. metadata: more keys."""
    raw = json.loads((folder / "config.json").read_text())
    raw["head_dim"] = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    tensors = {canonical_name(name): tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    writer = GGUFWriter(file, arch := ARCHITECTURES[raw["model_type"]])
    for key, value in (keys(raw, arch) | {"general.name": "tiny"} | vocabulary(raw["vocab_size"]) | metadata).items():
        add(writer, key, value)
    table = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), 8)
    held: dict[str, Tensor] = {}
    for name, parts in gathered(tensors, raw).items():
        stem, _, suffix = name.rpartition(".")
        own = f"{table.get_name(stem)}.{suffix}".removesuffix(".")
        plain = (
            name.endswith(("sinks", "conv.conv.weight"))
            or parts[0][1].dim() == 1
            or any(word in own for word in NOT_IN_BLOCKS)
        )
        data = np.stack([arranged(n, t, raw).numpy() for n, t in parts])
        data = data if ".experts." in name else data[0]
        kind = "F32" if plain else next((other for part, other in others.items() if part in own), type)
        stored, numbers = encoded(data, kind)
        writer.add_tensor(own, stored, raw_dtype=None if plain else GGMLQuantizationType[kind])
        numbers = numbers if ".experts." in name else numbers[None]
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


def keys(raw: dict[str, Any], arch: str) -> dict[str, Any]:
    found = {f"{arch}.{key}": raw[name] for name, key in KEYS.items() if raw.get(name) is not None}
    found[f"{arch}.attention.value_length"] = raw["head_dim"]
    found[f"{arch}.vocab_size"] = raw["vocab_size"]
    if raw.get("sliding_window") and arch in ("olmo2", "exaone4"):
        found[f"{arch}.attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in raw["layer_types"]]
    if arch.startswith("qwen35"):
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
    rope = raw["rope_parameters"]
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
    return found


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
            found.setdefault(f"{path}.{match[3]}", []).append((name, tensor))
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
        tensor = tensor.squeeze(1)
    if name.endswith(("mamba.A_log", "mamba.D")):
        return (-tensor.exp() if name.endswith("A_log") else tensor)[:, None]
    if name.endswith("mamba.norm.weight"):
        return tensor.view(raw["mamba_n_groups"], -1)
    if ".linear_attn." in name:
        tensor = -tensor.exp() if name.endswith("A_log") else tensor
        return value_heads(name, tensor, raw, tiled=True)
    return tensor + 1 if shifted(name, raw) else tensor


def rearranged(name: str, tensor: Tensor, raw: dict[str, Any]) -> Tensor:
    if heads := rotated_heads(name, raw):
        return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    if name.endswith(("mamba.A_log", "mamba.D", "mamba.norm.weight")):
        return (-tensor).log().flatten() if name.endswith("A_log") else tensor.flatten()
    if ".linear_attn." in name:
        tensor = value_heads(name, tensor, raw, tiled=False)
        tensor = (-tensor).log() if name.endswith("A_log") else tensor
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        return tensor.unsqueeze(1)
    return tensor - 1 if shifted(name, raw) else tensor


def shifted(name: str, raw: dict[str, Any]) -> bool:
    norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return norm and raw["model_type"].startswith(("gemma", "qwen3_5"))


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
    if ARCHITECTURES[raw["model_type"]] not in ("llama", "granite", "smollm3", "arcee", "granitehybrid"):
        return 0
    counts = {"q_proj": raw["num_attention_heads"], "k_proj": raw["num_key_value_heads"]}
    return next((count for part, count in counts.items() if f".{part}." in name), 0)


def rope_factors(raw: dict[str, Any]) -> dict[str, list[float]]:
    """What convert_hf_to_gguf.py makes of Llama 3's rule."""
    rope = raw["rope_parameters"]
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
