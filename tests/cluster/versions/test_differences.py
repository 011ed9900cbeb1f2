"""What `manta check OLD NEW` says before two versions meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.versions.description import VersionDescription, described
from cluster.versions.differences import compare
from engine.errors import ConfigError


def config(folder: Path, file_name: str = "new.yaml", **keys: Any) -> Path:
    file = folder / file_name
    models = [{"name": "m", "model": "pocket", **keys}]
    file.write_text(yaml.safe_dump({"applications": [{"import_path": "manta:build", "args": {"models": models}}]}))
    return file


@pytest.fixture
def old(tmp_path: Path) -> dict[str, Any]:
    """The description of this version."""
    result = CliRunner().invoke(app, ["check", str(config(tmp_path)), "--describe"])
    assert result.exit_code == 0
    return json.loads(result.stdout)


def lines(old: dict[str, Any], new: Path, exit_code: int = 0) -> list[str]:
    """What the command says, but its first line, which names the versions."""
    file = new.parent / "old.json"
    file.write_text(json.dumps(old))
    result = CliRunner().invoke(app, ["check", str(file), str(new)])
    assert result.exit_code == exit_code, result.output
    first, *others = result.stdout.splitlines()
    assert first.startswith(f"{old['version']} -> ")
    return others


def test_a_version_that_differs_in_nothing_reads_all(old, tmp_path):
    assert lines(old, config(tmp_path)) == [
        "model m: all digests are equal", "records: each reads what the other sends and stores",
    ]  # fmt: skip


def test_other_kernels_are_told_with_what_is_computed_again(old, tmp_path):
    old["models"]["m"]["kv"]["decode"]["numerics"] = "those of the last version"
    old["models"]["m"]["fingerprint"] = old["models"]["m"]["fingerprint"][:-8] + "0" * 8
    of_code, of_kv, _ = lines(old, config(tmp_path))
    assert "differs in code" in of_code and "409 answer_not_reproducible" in of_code
    assert "KV of decode differs in numerics: running texts are replayed" in of_kv


def test_another_option_is_told_by_its_name(old, tmp_path):
    of_options, of_kv, _ = lines(old, config(tmp_path, engine={"dtype": "bfloat16"}))
    assert "differs in options" in of_options and "KV of decode differs in dtype" in of_kv


def test_pools_and_models_of_only_one_version_are_told(old, tmp_path):
    assert "model m: only the new version has the pool prefill" in lines(old, config(tmp_path, prefill={}))
    assert lines(old, config(tmp_path, "new.yaml", name="n"))[:2] == [
        "model m: only the old version serves it", "model n: only the new version serves it",
    ]  # fmt: skip


def test_what_cannot_be_read_back_ends_with_exit_code_1(old, tmp_path):
    old["records"]["JobRecord"]["fields"].append("priority: int = 0")
    assert lines(old, config(tmp_path), exit_code=1)[-1] == (
        "records: not readable: JobRecord.priority was removed, or has another name"
    )


def test_tapes_of_schedulers_with_other_state_are_told(old, tmp_path):
    assert "tapes: `manta replay` refuses" in lines({**old, "tapes": "other"}, config(tmp_path))[1]


def test_a_description_of_a_later_version_with_more_to_tell_is_read(old, tmp_path):
    assert lines({**old, "nodes": ["more"]}, config(tmp_path))


@pytest.mark.parametrize("text", [None, "{}", "[", '{"version": 1}'], ids=["missing", "empty", "cut", "wrong"])
def test_what_is_no_description_is_refused(tmp_path, text):
    file = tmp_path / "old.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"old\.json must be a file written by `manta check FILE --describe`"):
        described(file)


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["old.json", "new.yaml", "--describe"], "--describe"),
        (["old.json", "new.yaml", "--tensor-parallel-size", "2"], "--tensor-parallel-size"),
        (["new.yaml", "--tensor-parallel-size", "2"], "--tensor-parallel-size"),
    ],
)
def test_flags_that_would_say_nothing_are_refused(arguments, flag):
    assert f"{flag} must be left out" in str(CliRunner().invoke(app, ["check", *arguments]).exception)


def test_two_configurations_are_compared_as_those_of_this_version(tmp_path):
    found = [described(config(tmp_path, f"{block}.yaml", engine={"block_size": block})) for block in (16, 32)]
    assert all(isinstance(one, VersionDescription) for one in found)
    assert any("KV of decode differs in block_size" in line for line in compare(*found).lines)
