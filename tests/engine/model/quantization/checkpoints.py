"""Quantized checkpoints as the tools write them, each with a twin of the weights that they stand for.

The packers follow the tools' own: compressed-tensors' pack_to_int32, AutoAWQ's WQLinear_GEMM, AutoGPTQ's QuantLinear,
written out one value at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = tuple[dict[str, Tensor], Tensor]  # tensors by their names' endings, and the weight that they stand for
FP8 = torch.float8_e4m3fn


def pack(values: Tensor, bits: int, dim: int, places: list[int] | None = None) -> Tensor:
    """Unsigned integers -> int32 words; the word's i-th value goes to its place i, or places[i]."""
    rows = values.movedim(dim, -1).tolist()
    count = 32 // bits
    places = places or list(range(count))
    words = []
    for row in rows:
        row = row + [0] * (-len(row) % count)
        groups = (row[i : i + count] for i in range(0, len(row), count))
        words.append([sum(int(v) << bits * place for v, place in zip(g, places, strict=True)) for g in groups])
    unsigned = torch.tensor(words, dtype=torch.int64)
    return unsigned.to(torch.int32).movedim(-1, dim).contiguous()  # wraps around: the bits stay


def grouped(weight: Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Unsigned values [out, in], scales [out, groups] and zero points [out, groups] of groups of inputs."""
    parts = weight.unflatten(1, (-1, group))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    middle, most = 1 << bits - 1, (1 << bits) - 1
    if symmetric:
        scale = (torch.maximum(-low, high) / (middle - 1)).to(dtype)
        zero = torch.full_like(low, middle)
    else:
        scale = ((high - low) / most).to(dtype)
        zero = (-low / scale.float()).round().clamp(1, most)
    values = (parts / scale.float()[..., None]).round() + zero[..., None]
    return values.clamp(0, most).flatten(1).int(), scale, zero.int()


def expand(values: Tensor, scale: Tensor, zero: Tensor, group_of: Tensor) -> Tensor:
    return (values - zero[:, group_of]).float() * scale.float()[:, group_of]


def fp8(block: tuple[int, int] | None = None, per: str = "tensor", name: str = "weight_scale", **more: Tensor):
    """One scale for the tensor, a `per` channel one, or one for each block."""

    def quantize(weight: Tensor) -> Stored:
        rows, columns = block or (weight.shape if per == "tensor" else (1, weight.shape[1]))
        scale = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        values, meant = torch.empty_like(weight), torch.empty_like(weight)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                scale[i, j] = weight[part].abs().max() / 448
                values[part] = (weight[part] / scale[i, j]).to(FP8).float()
                meant[part] = values[part] * scale[i, j]
        if block is None and per == "tensor":
            scale = scale[0] if "input_scale" in more else scale[0, 0]
        return {"weight": values.to(FP8), name: scale, **more}, meant

    return quantize


def int8(symmetric: bool = True) -> Callable[[Tensor], Stored]:
    """compressed-tensors' int-quantized, one scale per channel."""

    def quantize(weight: Tensor) -> Stored:
        values, scale, zero = grouped(weight, 8, weight.shape[1], symmetric, torch.bfloat16)
        tensors = {"weight": (values - 128).to(torch.int8), "weight_scale": scale}
        if not symmetric:
            tensors["weight_zero_point"] = (zero - 128).to(torch.int8)
        return tensors, expand(values, scale, zero, torch.zeros(weight.shape[1], dtype=torch.long))

    return quantize


def pack_quantized(bits: int, group: int | None, symmetric: bool) -> Callable[[Tensor], Stored]:
    def quantize(weight: Tensor) -> Stored:
        outputs, inputs = weight.shape
        size = group or inputs
        values, scale, zero = grouped(weight, bits, size, symmetric, torch.bfloat16)
        tensors = {
            "weight_packed": pack(values, bits, 1),
            "weight_scale": scale,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack(zero, bits, 0)
        return tensors, expand(values, scale, zero, torch.arange(inputs) // size)

    return quantize


def awq(group: int) -> Callable[[Tensor], Stored]:
    def quantize(weight: Tensor) -> Stored:
        values, scale, zero = grouped(weight, 4, group, False, torch.float16)
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ's: nibble i of a word holds column order[i]
        places = [order.index(i) for i in range(8)]
        tensors = {
            "qweight": pack(values.T, 4, 1, places),
            "qzeros": pack(zero.T, 4, 1, places),
            "scales": scale.T.contiguous(),
        }
        return tensors, expand(values, scale, zero, torch.arange(weight.shape[1]) // group)

    return quantize


def gptq(
    bits: int = 4, group: int | None = 16, symmetric: bool = True, ordered: bool = False, offset: int = 1
) -> Callable[[Tensor], Stored]:
    def quantize(weight: Tensor) -> Stored:
        inputs = weight.shape[1]
        size = group or inputs
        group_of = torch.arange(inputs) // size
        if ordered:
            group_of = group_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        columns = group_of.argsort(stable=True)  # those of one group side by side
        sorted_values, scale, zero = grouped(weight[:, columns], bits, size, symmetric, torch.float16)
        values = torch.empty_like(sorted_values)
        values[:, columns] = sorted_values
        tensors = {
            "qweight": pack(values.T, bits, 0),
            "qzeros": pack(zero.T - offset, bits, 1),
            "scales": scale.T.contiguous(),
            "g_idx": group_of.int(),
        }
        return tensors, expand(values, scale, zero, group_of)

    return quantize


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    defaults = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "group_size": None}
    group = {"targets": ["Linear"], "weights": defaults | weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FLOAT, INT4 = {"type": "float"}, {"num_bits": 4, "strategy": "group", "group_size": 32}
TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Stored]]] = {
    # the blocks are smaller than those of real models, and divide neither the weights nor the ranks' parts
    "fp8_blocks": (BLOCKS | {"weight_block_size": [20, 24]}, fp8((20, 24), name="weight_scale_inv")),
    "fp8_tensor": (BLOCKS, fp8()),
    "ct_fp8_channel": (
        compressed("float-quantized", FLOAT | {"strategy": "channel"}, TOKEN | FLOAT),
        fp8(per="channel"),
    ),
    "ct_fp8_tensor_static": (
        compressed("float-quantized", FLOAT | {"strategy": "tensor"}, STATIC),
        fp8(input_scale=torch.ones(1)),
    ),
    "ct_fp8_blocks": (
        compressed("float-quantized", FLOAT | {"strategy": "block", "block_structure": [16, 16]}, TOKEN | FLOAT),
        fp8((16, 16)),
    ),
    "ct_int8": (compressed("int-quantized", {"strategy": "channel"}), int8()),
    "ct_int8_asymmetric": (
        compressed("int-quantized", {"strategy": "channel", "symmetric": False}),
        int8(symmetric=False),
    ),
    "ct_int4": (compressed("pack-quantized", INT4), pack_quantized(4, 32, True)),
    "ct_int4_asymmetric": (compressed("pack-quantized", INT4 | {"symmetric": False}), pack_quantized(4, 32, False)),
    "ct_packed_int8": (compressed("pack-quantized", {"strategy": "channel"}), pack_quantized(8, None, True)),
    "awq": (AWQ, awq(32)),
    "awq_groups_of_16": (AWQ | {"group_size": 16}, awq(16)),
    "gptq": (GPTQ, gptq(group=32)),
    "gptq_asymmetric": (GPTQ | {"sym": False}, gptq(group=32, symmetric=False)),
    "gptq_v2": (GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, gptq(group=32, symmetric=False, offset=0)),
    "gptq_desc_act": (GPTQ | {"desc_act": True}, gptq(group=32, ordered=True)),
    "gptq_8_bits_one_group": (GPTQ | {"bits": 8, "group_size": -1}, gptq(8, None)),
}
W8A8 = (compressed("int-quantized", {"strategy": "channel"}, TOKEN), int8())


LINEAR = re.compile(r"(?<!indexer\.weights)_proj(_with_mqa)?\.weight$|\.(w[123]|indexer\.(wk|wq_b))\.weight$")


def is_linear(name: str) -> bool:
    return LINEAR.search(name) is not None


def quantize_folder(
    source: Path,
    target: Path,
    twin: Path,
    config: dict[str, Any],
    quantize: Callable[[Tensor], Stored],
    chosen: Callable[[str], bool] = is_linear,
) -> None:
    """Write to `target` the model of `source` with its linear layers quantized, and to `twin` what their weights stand
    for."""
    tensors, meant = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if chosen(name):
            stored, meant[name] = quantize(tensor)
            tensors |= {f"{name.removesuffix('weight')}{ending}": t.clone() for ending, t in stored.items()}
        else:
            tensors[name] = meant[name] = tensor
    fields = json.loads((source / "config.json").read_text())
    for folder, found, more in ((target, tensors, {"quantization_config": config}), (twin, meant, {})):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(found, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(fields | more))
