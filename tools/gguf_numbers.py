"""Writes the model of a GGUF file as an ordinary one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.model.checkpoint.folder import read_json, weight_files
from engine.model.loader import open_weights

TEXT_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_numbers(gguf: Path, to: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the model of a GGUF file into the folder `to`, with the numbers that the file stands for, as `dtype`."""
    fields = read_json(gguf, "config.json")
    fields.pop("quantization_config", None)
    (to / "config.json").write_text(json.dumps(fields))
    for name in (name for name in TEXT_FILES if (gguf / name).exists()):
        (to / name).write_bytes((gguf / name).read_bytes())
    with open_weights(*weight_files(gguf)) as tensors:
        numbers = {name: tensors.get_tensor(name).float().to(dtype).contiguous() for name in tensors.keys()}  # noqa: SIM118
    save_file(numbers, to / "model.safetensors")
