"""`manta pull --list` and `--remove`."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.cli.stored_models import remove_model, stored_models
from engine.errors import InvalidParameter
from engine.model.checkpoint import cache, smollm2
from engine.model.checkpoint.resolve import resolve
from tests.gguf_files import write_gguf
from tests.models import make_model


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch) -> Path:
    """A machine with SmolLM2, a GGUF file that has been served, and a model of the Hub."""
    monkeypatch.setattr(smollm2, "path", lambda: tmp_path / "kept" / "model.gguf")
    monkeypatch.setattr(cache, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    source = make_model(tmp_path / "source", "llama")
    for file in (tmp_path / "mine.gguf", tmp_path / "kept" / "model.gguf"):
        file.parent.mkdir(exist_ok=True)
        write_gguf(source, file, "F16")
    resolve(str(tmp_path / "mine.gguf"))
    resolve("smollm2")
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--tiny" / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text("{}" * 500)
    return tmp_path


def test_models_and_what_was_made_of_gguf_files_are_listed_with_their_sizes(machine):
    found = {(model.name, model.kind): model.bytes for model in stored_models()}
    mine, gguf = str(machine / "mine.gguf"), "metadata of a GGUF file"
    assert found.keys() == {
        (mine, gguf),
        ("org/tiny", "from the Hugging Face Hub"),
        ("smollm2", "fetched from the package index"),
        ("smollm2", gguf),
    }
    assert found["org/tiny", "from the Hugging Face Hub"] == 1000
    assert found["smollm2", "fetched from the package index"] == smollm2.path().stat().st_size
    assert 1000 < found[mine, gguf] < 100_000  # without the weights, to which it links
    shown = CliRunner().invoke(app, ["pull", "--list"])
    assert shown.exit_code == 0 and "org/tiny" in shown.stdout and "smollm2" in shown.stdout


def test_what_is_named_is_removed_and_a_file_of_the_users_own_stays(machine):
    mine = str(machine / "mine.gguf")
    sizes = {name: sum(model.bytes for model in stored_models() if model.name == name) for name in (mine, "smollm2")}
    assert {name: remove_model(name) for name in sizes} == sizes
    assert [model.name for model in stored_models()] == ["org/tiny"]
    assert Path(mine).is_file() and not smollm2.path().exists()
    assert CliRunner().invoke(app, ["pull", "--remove", "org/tiny"]).exit_code == 0
    assert stored_models() == []


def test_a_name_that_is_not_there_is_refused_with_those_that_are(machine):
    with pytest.raises(InvalidParameter, match=r"--remove must be one of .*mine\.gguf, org/tiny, smollm2, smollm2"):
        remove_model("llama")
    for name in {model.name for model in stored_models()}:
        remove_model(name)
    with pytest.raises(InvalidParameter, match="--remove must be a model that is kept here; there is none"):
        remove_model("llama")
