"""Published `vllm serve` commands, given to `manta serve` as they are, but for the model: a folder without weights."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from typer.testing import CliRunner

from cluster.cli.check.serve_config import check_serve_config
from cluster.cli.main import app
from engine.errors import ServingError
from tests.models import make_tokenizer
from tests.transformers_models import transformers_config

RECIPES = yaml.safe_load((Path(__file__).parent / "recipes.yaml").read_text())
SIZES = {  # that the ranks and lengths of the commands fit
    "hidden_size": 64,
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


def make_folder(folder: Path, recipe: dict[str, Any]) -> None:
    """Write all that a server reads of a model before its weights."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    config: dict[str, Any] = {"architectures": [recipe["model"]], "model_type": "unknown"}
    if hasattr(transformers, recipe["model"]):
        config = transformers_config(recipe["model"], **SIZES, vocab_size=len(tokenizer)).to_dict()
        config["architectures"] = [recipe["model"]]
    if "quantized" in recipe:
        config["quantization_config"] = QUANTIZED[recipe["quantized"]]
    (folder / "config.json").write_text(json.dumps(config, default=str))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def outcome(recipe: dict[str, Any], folder: Path) -> tuple[str, str]:
    """Return `starts` with what was said on stderr, or `refused` with the reason. The working directory is one with the
    files that the command names."""
    words = shlex.split(recipe["command"])
    model, *flags = words[words.index("serve") + 1 :]
    for file, text in recipe.get("files", {}).items():
        Path(file).write_text(text)
    for template in re.findall(r"\S+\.jinja", recipe["command"]):
        Path(template).parent.mkdir(exist_ok=True)
        Path(template).write_text("{{ messages }}")
    make_folder(folder, recipe)
    flags = [flag.replace(model, str(folder)) for flag in flags]
    result = CliRunner().invoke(app, ["serve", str(folder), *flags, "--print-config"])
    if result.exception is not None:
        return "refused", str(result.exception) if str(result.exception) != "1" else result.output
    try:
        check_serve_config(yaml.safe_load(result.stdout))
    except ServingError as error:
        return "refused", str(error)
    return "starts", result.stderr


if __name__ == "__main__":
    import os, tempfile, collections
    n = collections.Counter()
    for r in RECIPES:
        with tempfile.TemporaryDirectory() as d:
            os.chdir(d); (Path(d)/"model").mkdir()
            try: o = outcome(r, Path(d)/"model")
            except Exception as e: o = ("crash", repr(e))
            n[o[0]] += 1
            print(o[0], "|", re.sub(r".*vllm serve (\S+).*", r"\1", " ".join(r["command"].split())), "|", o[1].strip().replace(d,"")[:230])
    print(n)
