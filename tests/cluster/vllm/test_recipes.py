"""Published `vllm serve` commands, given to `manta serve` as they are, but for the model: a folder without weights."""

from __future__ import annotations

import contextlib
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
from cluster.cli.models import architectures, check_model
from engine.errors import RequestError, UnsupportedArchitecture
from engine.model.checkpoint import overlay
from tests.models import make_tokenizer
from tests.transformers_models import transformers_config

COVERED = {architecture.name for architecture in architectures()}
RECIPES = yaml.safe_load((Path(__file__).parent / "recipes.yaml").read_text())
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


def make_folder(folder: Path, recipe: dict[str, Any]) -> None:
    """Write all that a server reads of a model before its weights."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    config: dict[str, Any] = {}
    if recipe["model"] in COVERED:
        config = transformers_config(recipe["model"], **SIZES, vocab_size=len(tokenizer)).to_dict()
    elif hasattr(transformers, recipe["model"]):
        config = getattr(transformers, recipe["model"]).config_class().to_dict()
    config |= {"architectures": [recipe["model"]], **recipe.get("fields", {})}
    if "quantized" in recipe:
        config["quantization_config"] = QUANTIZED[recipe["quantized"]]
    (folder / "config.json").write_text(json.dumps(config, default=str))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def start(recipe: dict[str, Any], folder: Path) -> str:
    """Start a server as far as that goes without weights, in a working directory with the files that the command names,
    and return what was said on stderr. Raises ServingError."""
    words = shlex.split(recipe["command"])
    model, *flags = words[words.index("serve") + 1 :]
    for file, text in recipe.get("files", {}).items():
        Path(file).write_text(text)
    for template in re.findall(r"\S+\.jinja", recipe["command"]):
        Path(template).parent.mkdir(exist_ok=True)
        Path(template).write_text("{{ messages }}")
    make_folder(folder, recipe)
    flags = [flag.replace(model, str(folder)) for flag in flags]
    ranks = flags[flags.index("-tp") + 1] if "-tp" in flags else "1"
    result = CliRunner().invoke(app, ["serve", str(folder), *flags, "--print-config"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    check_model(str(folder), int(ranks))
    check_serve_config(yaml.safe_load(result.stdout))
    return result.stderr


@pytest.mark.parametrize("recipe", RECIPES, ids=[str(recipe["command"]).split("serve ")[1][:60] for recipe in RECIPES])
def test_a_published_command_starts_or_is_refused_for_a_reason_that_matters(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(overlay, "CACHE", tmp_path / "cache")
    (folder := tmp_path / "model").mkdir()
    match recipe.get("ends"):
        case None:
            assert len(start(recipe, folder).splitlines()) <= 1
        case "architecture":
            with contextlib.suppress(UnsupportedArchitecture):  # and no flag does
                start(recipe, folder)
        case flag:
            with pytest.raises(RequestError, match=f"^{flag} "):
                start(recipe, folder)


def test_there_are_forty_from_as_many_places_as_possible():
    assert len(RECIPES) == 40
    assert len({recipe["from"] for recipe in RECIPES}) > 25
