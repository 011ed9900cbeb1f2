from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.distribution import copy_examples, version_and_commit
from cluster.serve_config import load
from engine.errors import InvalidParameter

ROOT = Path(__file__).parents[2]


def test_version_is_that_of_pyproject_with_the_commit():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.fullmatch(rf"{re.escape(version)}( \(commit [0-9a-f]{{12}}(-dirty)?\))?", version_and_commit())
    assert CliRunner().invoke(app, ["--version"]).output == f"manta {version_and_commit()}\n"


def test_what_help_texts_name_is_copied_once(tmp_path):
    folder = tmp_path / "mine"
    result = CliRunner().invoke(app, ["init", str(folder)])
    assert result.exit_code == 0, result.output
    assert load(folder / "serve_config_pd.yaml") == yaml.safe_load((ROOT / "serve_config_pd.yaml").read_text())
    assert (folder / "docs" / "handoff.md").is_file() and (folder / "k8s" / "README.md").is_file()
    (folder / "serve_config.yaml").unlink()
    with pytest.raises(InvalidParameter, match="one without a serve_config_pd"):
        copy_examples(folder)
    assert not (folder / "serve_config.yaml").exists()


def test_every_file_that_a_help_text_names_is_among_them():
    sources = [*(ROOT / "cluster").rglob("*.py"), ROOT / "engine" / "config.py"]
    named = {name for file in sources for name in re.findall(r"\b(?:docs|k8s)/[\w/.-]+\w", file.read_text())}
    assert {"docs/handoff.md", "k8s/overlays/single-gpu"} <= named
    assert not [name for name in named if not (ROOT / name).exists()]


def test_pyproject_is_the_one_place_of_the_version_that_pages_and_manifests_name():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    files = [file for kind in ("docs/*.md", "k8s/**/*.yaml", "k8s/**/*.md", "k8s/docker/*") for file in ROOT.glob(kind)]
    named = re.compile(r"(?:manta_serve-|manta:|newTag: |(?<!/)\b(?:appV|v)ersion: )(\d+\.\d+\.\d+)")
    found = {(file.name, number) for file in files if file.is_file() for number in named.findall(file.read_text())}
    assert len(found) >= 5 and {number for _, number in found} == {version}, found
