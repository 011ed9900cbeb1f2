"""Folders of small models without weights, for what a server does before it reads any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

from cluster.cli.models import architectures
from tests.models import make_tokenizer
from tests.transformers_models import transformers_config

COVERED = {architecture.name for architecture in architectures()}
SIZES = {  # that the ranks and lengths of the commands fit
    "hidden_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2**18,
}
QUANTIZED: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    },
}


def make_folder(
    folder: Path, architecture: str, quantized: str | None = None, fields: dict[str, Any] | None = None
) -> Path:
    """Write all that a server reads of a model before its weights, and return the folder.

    quantized: a key of QUANTIZED. fields: of config.json, in place of others.
    """
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    config: dict[str, Any] = {}
    if architecture in COVERED:
        config = transformers_config(architecture, **SIZES, vocab_size=len(tokenizer)).to_dict()
    elif hasattr(transformers, architecture):
        config = getattr(transformers, architecture).config_class().to_dict()
    config |= {"architectures": [architecture], **(fields or {})}
    if quantized is not None:
        config["quantization_config"] = QUANTIZED[quantized]
    (folder / "config.json").write_text(json.dumps(config, default=str))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder
