"""Fields of config.json that anybody may have written: wrong types, no sizes, and numbers that no model has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelFolderError, UnsupportedArchitecture
from engine.model.checkpoint.kinds import KINDS
from engine.model.config import ModelConfig
from tests.models import FAMILIES, make_model, with_slow
from tests.products import few
from tests.transformers_models import make_transformers_model

NAN, INFINITY = float("nan"), float("inf")
WRONG: tuple[Any, ...] = ("many", -1, 0, 10**30, 1e9, 2.5, NAN, -INFINITY, True, None, [], [None], [[1]], {})


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: make_model(root / name, name) for name in sorted(FAMILIES)}


def read(folder: Path, raw: dict[str, Any]) -> str:
    """What is said of a model with these fields; empty if it is accepted."""
    said = ""
    try:
        ModelConfig.from_fields(raw, folder)
    except (ModelFolderError, UnsupportedArchitecture) as error:
        said = str(error)
    assert "\n" not in said and len(said) < 1000
    return said


@pytest.mark.parametrize("family", with_slow(sorted(FAMILIES)))
def test_each_field_of_each_family_is_read_or_refused_in_one_line(family, folders):
    raw = json.loads((folders[family] / "config.json").read_text())
    assert not read(folders[family], raw)
    for key, own in raw.items():
        for value in WRONG:
            changes = [{key: value}]
            if isinstance(own, dict):
                changes += [{key: own | {inner: value}} for inner in own]
            for change in changes:
                said = read(folders[family], raw | change)
                assert "cannot be read" not in said, (change, said)


@pytest.mark.parametrize("architecture", few(1, ["GraniteMoeForCausalLM", "GPT2LMHeadModel", "Olmo2ForCausalLM"]))
def test_fields_that_only_transformers_reads_are_bounded_too(architecture, tmp_path):
    folder = make_transformers_model(tmp_path, architecture)
    raw = json.loads((folder / "config.json").read_text())
    assert not read(folder, raw)
    for key in raw:
        for value in WRONG:
            read(folder, raw | {key: value})


def test_a_value_is_refused_with_field_value_and_limit(folders):
    raw = json.loads((folders["llama"] / "config.json").read_text())
    for key, value, limit in (
        ("num_hidden_layers", 1e9, r"num_hidden_layers = 1000000000.0 is not supported: must be a whole number from 1"),
        ("num_hidden_layers", 10**9, "num_hidden_layers = 1000000000 is not supported: must be a whole number from 1"),
        ("rope_parameters", {"rope_type": "linear", "factor": "4"}, r"rope_parameters\.factor = '4' is not supported"),
        ("num_key_value_heads", 3, r"num_key_value_heads = 3 is not supported: must be a divisor of the 4 attention"),
        ("hidden_act", "a" * 10_000, r"hidden_act = 'a{99}… is not supported: must be silu or"),
    ):
        with pytest.raises(ModelFolderError, match=limit):
            ModelConfig.from_fields({**raw, key: value}, folders["llama"])


@pytest.mark.parametrize("key", sorted(KINDS))
def test_no_kind_takes_what_is_nested_or_not_a_number(key):
    kind = KINDS[key]
    assert not kind.accepts(object())
    assert not kind.accepts([[]]) and not kind.accepts([{}])
    if int in kind.types:
        assert not kind.accepts(float("nan")) and (not kind.accepts(10**300) or key == "time_step_limit")
