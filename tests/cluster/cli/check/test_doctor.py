"""`manta doctor` as a whole, on the machine that runs the tests."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from cluster.cli.check import doctor
from cluster.cli.main import app
from tests.models import make_model

CONFIG = """
http_options: {{host: 127.0.0.1, port: 65123}}
applications:
  - name: manta
    import_path: manta:build
    args:
      models:
        - name: tiny
          model: {folder}
          decode: {{num_cpus: {num_cpus}}}
"""


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    """Other tests may run Ray at the same time."""
    monkeypatch.setattr(doctor, "find_nodes", lambda _: None)


def findings(*flags: str) -> tuple[int, list[dict[str, str]]]:
    result = CliRunner().invoke(app, ["doctor", "--json", *flags])
    return result.exit_code, json.loads(result.stdout)


def test_model_that_fits_this_machine_is_said_to_and_one_that_does_not_ends_with_exit_code_1(tmp_path):
    folder, config = make_model(tmp_path / "model", "llama", tokenizer=True), tmp_path / "serve_config.yaml"
    config.write_text(CONFIG.format(folder=folder, num_cpus=0.1))
    _, found = findings("--config", str(config))
    told = {finding["topic"]: finding["level"] for finding in found}
    assert told["configuration"] == told["decode of tiny"] == told["all replicas"] == "ok"
    assert any(finding["message"] == "65123, for the API, is free" for finding in found)
    config.write_text(CONFIG.format(folder=folder, num_cpus=5000))
    code, found = findings("--config", str(config))
    assert code == 1
    (problem,) = [
        finding for finding in found if finding["topic"] == "decode of tiny" and finding["level"] == "problem"
    ]
    assert "a replica needs 1 rank with 5000 CPU" in problem["message"]


def test_mistake_in_a_configuration_is_one_of_the_problems(tmp_path):
    config = tmp_path / "serve_config.yaml"
    config.write_text("applications: [{name: a, import_path: 'manta:build', args: {models: []}}]")
    code, found = findings("--config", str(config))
    assert code == 1
    assert [f["message"] for f in found if f["topic"] == "configuration"] == [
        "configuration: models must be a list of at least 1 item, got []"
    ]


def test_for_people_each_line_begins_with_how_bad_it_is():
    result = CliRunner().invoke(app, ["doctor"])
    lines = [line for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert {line.split()[0] for line in lines} <= {"ok", "warning", "problem"}
    assert any("Python" in line for line in lines)


def test_machine_with_gpus_but_without_a_c_compiler_has_a_problem(monkeypatch):
    """Triton compiles its launcher at the first kernel."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("PATH", "/nonexistent")
    (found,) = doctor.check_gpus()
    assert (found.level, found.topic) == ("problem", "C compiler")
    monkeypatch.setenv("CC", "/opt/bin/cc")
    assert [(found.level, found.message) for found in doctor.check_gpus()] == [("ok", "/opt/bin/cc")]
