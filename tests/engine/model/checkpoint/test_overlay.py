from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelFolderError
from engine.model.checkpoint import cache as cache_module
from engine.model.checkpoint.identity import identity_of
from engine.model.checkpoint.overlay import engine_folder
from engine.model.checkpoint.resolve import resolve
from engine.text.chat_tokenizer import ChatTokenizer
from tests.models import make_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(cache_module, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    fields = {"rope_theta": 1e4, "text_config": {"hidden_size": 8, "num_hidden_layers": 2}}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "added_tokens.json").write_text("{}")
    (folder / "1_Pooling").mkdir()
    return folder


def test_without_options_a_model_is_read_from_its_own_folder(model, cache):
    assert engine_folder(EngineConfig(model=str(model))) == model
    assert not cache.exists()


def test_overrides_replace_fields_of_the_configuration_also_inside_others(model):
    overrides = {"rope_theta": 1e6, "text_config": {"num_hidden_layers": 1}, "new": [1]}
    folder = engine_folder(EngineConfig(model=str(model), hf_overrides=json.dumps(overrides)))
    fields = json.loads((folder / "config.json").read_text())
    assert fields == {"rope_theta": 1e6, "text_config": {"hidden_size": 8, "num_hidden_layers": 1}, "new": [1]}
    assert {file.name for file in folder.iterdir()} == {file.name for file in model.iterdir()}
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((model / "config.json").read_text())["rope_theta"] == 1e4


def test_a_rotary_embedding_by_its_old_names_is_put_where_the_configuration_has_it(model):
    scaling = {"rope_type": "yarn", "factor": 4.0}
    (model / "config.json").write_text('{"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}')
    config = EngineConfig(model=str(model), hf_overrides=json.dumps({"rope_scaling": scaling}))
    fields = json.loads((engine_folder(config) / "config.json").read_text())
    assert fields == {"rope_parameters": {**scaling, "rope_theta": 5e6}}
    config = EngineConfig(model=str(model), hf_overrides='{"rope_theta": 1}')
    fields = json.loads((engine_folder(config) / "config.json").read_text())
    assert fields == {"rope_parameters": {"rope_type": "default", "rope_theta": 1}}

    (model / "config.json").write_text('{"rope_parameters": {"full_attention": {"rope_type": "default"}}}')
    with pytest.raises(ConfigError, match=r"rope_parameters, as in the model's config\.json"):
        engine_folder(config)


def test_another_tokenizer_replaces_all_files_of_the_models_own(model, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"):
        (other / name).write_text(f"other {name}")
    folder = engine_folder(EngineConfig(model=str(model), tokenizer=str(other)))
    own = {"config.json", "model.safetensors", "1_Pooling"}
    assert {f.name for f in folder.iterdir()} == own | {
        "tokenizer.model",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_processes_that_start_together_make_one_folder_and_other_options_make_another(model, cache):
    config = EngineConfig(model=str(model), hf_overrides='{"rope_theta": 1}')
    with ThreadPoolExecutor(8) as threads:
        folders = set(threads.map(lambda _: engine_folder(config), range(16)))
    assert len(folders) == 1
    assert engine_folder(EngineConfig(model=str(model), hf_overrides='{"rope_theta": 2}')) not in folders
    assert len(list(cache.iterdir())) == 2


def test_a_changed_file_makes_another_folder(model):
    config = EngineConfig(model=str(model), hf_overrides='{"rope_theta": 1}')
    first = engine_folder(config)
    (model / "config.json").write_text('{"hidden_size": 9}')
    assert json.loads((engine_folder(config) / "config.json").read_text()) == {"hidden_size": 9, "rope_theta": 1}
    assert json.loads((first / "config.json").read_text())["text_config"]


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_overrides_that_are_no_object_are_refused_by_name(model, text):
    with pytest.raises(ConfigError, match="hf_overrides must be a JSON object"):
        engine_folder(EngineConfig(model=str(model), hf_overrides=text))


def test_a_tokenizer_that_is_not_there_is_refused_by_name(model):
    with pytest.raises(ModelFolderError, match=r"/none"):
        engine_folder(EngineConfig(model=str(model), tokenizer="/none"))


def test_an_engine_obeys_both_and_has_an_identity_of_its_own(tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "other")
    options = {
        "model": "pocket",
        "tokenizer": str(tmp_path / "other"),
        "hf_overrides": '{"max_position_embeddings": 64}',
    }
    own, changed = identity_of(resolve("pocket")), identity_of(engine_folder(EngineConfig(**options)))
    assert own.weights != changed.weights
    assert own.vocabulary != changed.vocabulary
    with LLM(num_threads=1, **options) as llm:
        (output,) = llm.generate(["The fox"], SamplingParams(max_tokens=200, ignore_eos=True, temperature=0))
    assert output.prompt_token_ids == ChatTokenizer.from_folder(tmp_path / "other").encode("The fox")
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 64
