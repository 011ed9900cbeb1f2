"""Folders of LoRA adapters, in PEFT's format and without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def write_adapter(
    folder: Path, rank: int = 4, seed: int = 0, *, inputs: int = 16, outputs: int = 32, **config: object
) -> Path:
    """One of a single layer. seed: of its weights."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    factors = {"A": rng.random((rank, inputs), np.float32), "B": rng.random((outputs, rank), np.float32)}
    tensors = {Q.format(name): factor for name, factor in factors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    keys = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(keys))
    return folder
