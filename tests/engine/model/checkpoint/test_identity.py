from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import ModelFolderError
from engine.model.checkpoint.identity import identity_of
from tests.models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def edit(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_copy_is_the_same_model(model, copy):
    assert identity_of(copy) == identity_of(model)


def test_other_weights_keep_the_vocabulary(model, tmp_path):
    other = identity_of(make_model(tmp_path, "llama", tokenizer=True, seed=1))
    assert other.weights != identity_of(model).weights
    assert other.vocabulary == identity_of(model).vocabulary != ""


def test_other_config_is_another_model(model, copy):
    edit(copy / "config.json", lambda config: config.update(rms_norm_eps=1e-3))
    assert identity_of(copy).weights != identity_of(model).weights


def test_same_vocabulary_written_otherwise_is_the_same(model, copy):
    edit(copy / "tokenizer.json", lambda content: content.update(truncation=None, padding=None))
    assert identity_of(copy) == identity_of(model)


def test_two_tokens_that_change_places_make_another_vocabulary(model, copy):
    def swap(content: dict) -> None:
        vocab = content["model"]["vocab"]
        a, b = list(vocab)[10:12]
        vocab[a], vocab[b] = vocab[b], vocab[a]

    edit(copy / "tokenizer.json", swap)
    assert identity_of(copy).vocabulary != identity_of(model).vocabulary


def test_unigram_vocabulary_counts_by_position_and_not_by_score(tmp_path, copy):
    def written(*tokens: tuple[str, float]) -> str:
        (copy / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram", "vocab": tokens}}))
        return identity_of(copy).vocabulary

    assert written(("a", -1.0), ("b", -2.0)) == written(("a", -3.0), ("b", -2.0))
    assert written(("a", -1.0), ("b", -2.0)) != written(("b", -1.0), ("a", -2.0))


def test_model_without_tokenizer_has_an_empty_vocabulary(tmp_path):
    assert identity_of(make_model(tmp_path, "llama")).vocabulary == ""


def test_broken_tokenizer_is_named(copy):
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json cannot be read"):
        identity_of(copy)
