from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.cli.model_support import COMPARED, support_by_name, well_known
from cluster.cli.models import architectures, markdown
from engine.errors import ConfigError, ModelFolderError, UnsupportedArchitecture
from engine.model.families.refused import REFUSED
from tests.compared import as_text, compared
from tests.models import COMMON
from tests.transformers_models import make_transformers_model


def test_the_table_in_the_docs_is_the_list_that_tests_read():
    page = Path(__file__).parents[3].joinpath("docs", "models.md").read_text()
    assert markdown() in page, "write the output of `manta models --markdown` into docs/models.md"


def test_what_the_table_calls_compared_is_what_the_tests_of_this_version_compare():
    assert COMPARED.read_text() == as_text(compared()), "python -m tests.compared"
    untested = [row.name for row in architectures() if not row.tested]
    assert untested == [], "no test compares them with transformers"


def test_a_hundred_well_known_models_have_a_line_each_that_their_check_prints_too(tmp_path):
    page = Path(__file__).parents[3].joinpath("docs", "well_known_models.md").read_text()
    assert CliRunner().invoke(app, ["models", "--well-known"]).stdout.strip() in page, "manta models --well-known"
    assert well_known().date in page and well_known().source in page
    lines = {name: support_by_name(*architectures) for name, *architectures in well_known().models}
    assert len(lines) == 100 and not [name for name, line in lines.items() if "no test covers" in line]
    make_transformers_model(tmp_path, "SmolLM3ForCausalLM")
    printed = CliRunner().invoke(app, ["check", str(tmp_path)]).stdout
    assert printed == f"{tmp_path} {lines['HuggingFaceTB/SmolLM3-3B']}\n"


@pytest.mark.parametrize("architecture", REFUSED)
def test_a_known_architecture_that_cannot_be_computed_is_refused_with_what_is_missing(tmp_path, architecture):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "x"}))
    result = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert isinstance(result.exception, UnsupportedArchitecture)
    assert f"is refused: {result.exception}" == support_by_name(architecture)


def test_models_are_listed_once_each_with_the_code_that_runs_them():
    found = json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)
    # the text part of one architecture may be of two kinds, one of them native
    assert len({(row["name"], row["path"]) for row in found}) == len(found) == len(list(architectures()))
    assert {row["path"] for row in found} == {"native", "transformers"}


def test_a_model_is_checked_by_its_configuration_alone(tmp_path):
    make_transformers_model(tmp_path, "SmolLM3ForCausalLM")
    (tmp_path / "model.safetensors").unlink()
    result = CliRunner().invoke(app, ["check", str(tmp_path), "--tensor-parallel-size", "2"])
    assert result.exit_code == 0
    assert "runs on transformers' own code for SmolLM3ForCausalLM over Manta's attention" in result.stdout
    assert "native code for Qwen3ForCausalLM" in CliRunner().invoke(app, ["check", "pocket"]).stdout


@pytest.mark.parametrize(
    ("config", "architecture", "arguments", "error", "reason"),
    [
        (transformers.DiffLlamaConfig, "DiffLlamaForCausalLM", [], UnsupportedArchitecture, "a layer attends twice"),
        (transformers.OPTConfig, "OPTForCausalLM", ["--tensor-parallel-size", "2"], ConfigError, "no plan to split"),
    ],
    ids=["needs more", "one rank"],
)
def test_a_model_that_cannot_run_is_refused_with_the_reason(tmp_path, config, architecture, arguments, error, reason):
    fields = {name: COMMON[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
    made = config(**fields, word_embed_proj_dim=48) if config is transformers.OPTConfig else config(**fields)
    made.architectures = [architecture]
    made.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["check", str(tmp_path), *arguments])
    assert isinstance(result.exception, error) and reason in str(result.exception)


def test_what_is_neither_a_configuration_nor_a_model_is_an_error():
    assert isinstance(CliRunner().invoke(app, ["check", "nothing here"]).exception, ModelFolderError)
