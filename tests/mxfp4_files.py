"""A small gpt-oss whose experts are in MXFP4."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.models import make_model

SHAPE = {"hidden_size": 64, "intermediate_size": 96}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}


def make_mxfp4(quantized: Path, twin: Path) -> tuple[Path, Path]:
    """Write a checkpoint with random experts in MXFP4, and its twin in float32, into two empty folders."""
    make_model(twin, "gpt_oss", **SHAPE)
    tensors, generator = load_file(twin / "model.safetensors"), torch.Generator().manual_seed(0)
    packed, meant = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = packed.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    shutil.copytree(twin, quantized, dirs_exist_ok=True)
    save_file(packed, quantized / "model.safetensors")
    save_file(meant, twin / "model.safetensors")
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": MXFP4}))
    return quantized, twin
