from __future__ import annotations

import re

from typer.testing import CliRunner

from cluster.cli import main as cli
from deployments.frontend.api_keys import ApiKeys
from engine.errors import ConfigError, RequestError


def test_generated_key_opens_the_server_that_has_its_line(tmp_path):
    result = CliRunner().invoke(cli.app, ["hash-key", "alice", "--generate"])
    file = tmp_path / "keys"
    file.write_text(result.stdout)
    key = re.search(r"sk-\S+", result.stderr)[0]
    assert key not in result.stdout
    assert ApiKeys(file).find(key).name == "alice"


def test_existing_key_is_asked_for(tmp_path):
    result = CliRunner().invoke(cli.app, ["hash-key", "bob"], input="sk-old\n")
    file = tmp_path / "keys"
    file.write_text(result.stdout)
    assert ApiKeys(file).find("sk-old").name == "bob"


def test_name_that_would_break_the_file_is_refused():
    assert isinstance(CliRunner().invoke(cli.app, ["hash-key", "a b", "--generate"]).exception, RequestError)


def test_manta_check_looks_at_the_file_of_keys(tmp_path):
    keys, config = tmp_path / "keys", tmp_path / "serve_config.yaml"
    args = f"{{models: [{{name: m, model: pocket}}], ingress: {{api_keys_file: '{keys}'}}}}"
    config.write_text(f"applications: [{{import_path: 'manta:build', args: {args}}}]")
    keys.write_text("sk-plain\n")
    assert isinstance(CliRunner().invoke(cli.app, ["check", str(config)]).exception, ConfigError)
    keys.write_text(CliRunner().invoke(cli.app, ["hash-key", "alice", "--generate"]).stdout)
    assert CliRunner().invoke(cli.app, ["check", str(config)]).exit_code == 0
