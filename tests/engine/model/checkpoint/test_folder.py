from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from engine import pocket
from engine.errors import ConfigError, ModelFolderError
from engine.model.checkpoint.folder import eos_token_ids, read_json
from engine.model.checkpoint.resolve import resolve
from engine.model.checkpoint.sampling_defaults import default_sampling


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def test_a_local_folder_is_itself(folder):
    assert resolve(str(folder)) == folder


def test_pocket_is_the_bundled_folder(folder, monkeypatch):
    monkeypatch.setattr(pocket, "PATH", folder)
    assert resolve("pocket") == folder


def test_a_hub_id_is_downloaded_without_weights_in_other_formats(folder, monkeypatch):
    asked = {}

    def download(model: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        names = ["config.json", "model.safetensors", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.json"]
        names += ["tiktoken.model", "qwen.tiktoken", "vocab.txt"]
        asked[model] = list(filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/some-model_1.5") == folder
    tokenizer = ["tiktoken.model", "qwen.tiktoken", "vocab.txt"]
    assert asked == {"org/some-model_1.5": ["config.json", "model.safetensors", *tokenizer]}


def test_a_model_that_the_hub_does_not_give_is_a_clear_error(monkeypatch):
    def offline(model: str, **_: object) -> str:
        raise LocalEntryNotFoundError("cannot reach the Hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelFolderError, match=r"'org/name': no such local folder, and it .* Hub: .* cannot reach"):
        resolve("org/name")


def test_a_hub_id_may_name_a_revision(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda repo, revision, **_: asked.append((repo, revision)) or str(folder)
    )
    for model in ("org/name", "org/name@v1.2", "org/name@refs/pr/3"):
        assert resolve(model) == folder
    assert asked == [("org/name", None), ("org/name", "v1.2"), ("org/name", "refs/pr/3")]


@pytest.mark.parametrize("model", ["nonsense", "/no/such/folder", "../a/b", "a/b/c", "./org/name", "org/"])
def test_what_is_neither_a_folder_nor_a_hub_id_asks_nobody(model, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ModelFolderError, match="no such folder"):
        resolve(model)


def test_a_folder_without_config_is_refused(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"has no config\.json"):
        resolve(str(folder))


def test_a_folder_with_pickled_weights_only_says_so(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFolderError, match=r"no \*\.safetensors, only pytorch_model\.bin"):
        resolve(str(folder))


def test_end_tokens_may_be_one_or_many_or_none(folder):
    assert eos_token_ids(folder) == {2}
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert eos_token_ids(folder) == {5, 6}
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text("{}")
    assert eos_token_ids(folder) == frozenset()


def test_default_sampling_holds_only_what_the_model_names(folder):
    assert default_sampling(folder) == {}
    fields = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "transformers_version": "4.51.0"}
    (folder / "generation_config.json").write_text(json.dumps(fields))
    assert default_sampling(folder) == {"temperature": 0.6, "top_k": 20}


def test_default_sampling_comes_from_another_folder_or_from_nowhere_and_fields_may_be_overridden(folder, tmp_path):
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "max_new_tokens": 9}')
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_p": 0.5}')
    assert default_sampling(folder) == {"temperature": 0.6, "max_tokens": 9}
    override = {"max_new_tokens": 200, "presence_penalty": 1.0, "do_sample": True}
    assert default_sampling(folder, "vllm", override) == {"presence_penalty": 1.0, "max_tokens": 200}
    assert default_sampling(folder, "auto", override) == {
        "temperature": 0.6,
        "presence_penalty": 1.0,
        "max_tokens": 200,
    }
    assert default_sampling(folder, str(other)) == {"top_p": 0.5}
    with pytest.raises(ConfigError, match=r"^configuration: override_generation_config must be one of temperature, "):
        default_sampling(folder, "auto", {"temprature": 1})
    with pytest.raises(ModelFolderError, match=r"generation_config\.json"):
        default_sampling(folder, str(tmp_path / "none"))


def test_a_generation_config_that_is_null_is_none(folder):
    (folder / "generation_config.json").write_text("null\n")
    assert default_sampling(folder) == {}
    assert eos_token_ids(folder) == {2}


@pytest.mark.parametrize(("text", "problem"), [("{", "not valid JSON"), ("[]", "not a JSON object")])
def test_a_broken_json_file_is_named(folder, text, problem):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelFolderError, match=rf"config\.json is {problem}"):
        read_json(folder, "config.json")
