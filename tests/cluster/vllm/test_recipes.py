"""Published `vllm serve` commands, given to `manta serve` as they are, but for the model: a folder without weights."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.cli.models import check_model
from cluster.serve_config import check_serve_config
from engine.errors import RequestError, UnsupportedArchitecture
from engine.model.checkpoint import cache
from tests.weightless_models import make_folder

RECIPES = yaml.safe_load((Path(__file__).parent / "recipes.yaml").read_text())


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
    make_folder(folder, recipe["model"], recipe.get("quantized"), recipe.get("fields"))
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
    monkeypatch.setattr(cache, "CACHE", tmp_path / "cache")
    (folder := tmp_path / "model").mkdir()
    match recipe.get("ends"):
        case None:
            assert len(start(recipe, folder).splitlines()) <= 1
        case "architecture":
            with pytest.raises(UnsupportedArchitecture):
                start(recipe, folder)
        case flag:
            with pytest.raises(RequestError, match=f"^{flag} "):
                start(recipe, folder)


def test_there_are_forty_from_as_many_places_as_possible():
    assert len(RECIPES) == 40
    assert len({recipe["from"] for recipe in RECIPES}) > 25
