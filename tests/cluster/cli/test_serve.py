"""`manta serve`: what its flags stand for. That it serves is tested in tests/serve."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ray._common.utils as ray_utils
import yaml
from typer.testing import CliRunner

from cluster.cli import serve as serve_command
from cluster.cli.check.finding import Finding
from cluster.cli.main import app, main
from cluster.config.app_config import AppConfig
from cluster.flags import WITHOUT, engine_flags
from cluster.serve_config import memory_may_be_short
from engine.config import EngineConfig
from engine.devices.free_memory import FreeMemory
from engine.errors import ServingError, StartupError

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """What `manta serve` sets for Ray ends with the test."""
    with patch.dict(os.environ):
        yield


@dataclass
class Served:
    config: dict[str, Any]
    address: str | None
    environment: dict[str, str]


@pytest.fixture
def served(monkeypatch) -> list[Served]:
    """What Ray would have been started with."""
    found: list[Served] = []
    take = lambda config, address, **_: found.append(Served(config, address, dict(os.environ)))  # noqa: E731
    monkeypatch.setattr("deployments.ray_driver.serve_until_interrupted", take)
    return found


def printed(*flags: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["serve", *flags, "--print-config"])
    assert result.exit_code == 0, result.output
    config: dict[str, Any] = yaml.safe_load(result.stdout)
    return config


def args(*flags: str) -> dict[str, Any]:
    found: dict[str, Any] = printed(*flags)["applications"][0]["args"]
    return found


def test_without_flags_it_is_the_application_of_serve_config_yaml():
    assert printed() == yaml.safe_load((ROOT / "serve_config.yaml").read_text())


def test_flags_for_two_pools_are_the_application_of_serve_config_pd_yaml():
    flags = ["--num-threads", "1", "--num-cpus", "0.75", "--prefill-replicas", "1", "--set", "handoff.policy=auto"]
    expected = AppConfig.of(yaml.safe_load((ROOT / "serve_config_pd.yaml").read_text())["applications"][0])
    found = AppConfig.of(printed("pocket", *flags)["applications"][0])
    assert found == expected


def test_every_field_of_the_engine_has_a_flag_that_sets_it_and_a_help_text():
    names = {field.name for field in fields(EngineConfig)}
    flags = {flag.name: flag for flag in engine_flags()}
    assert set(flags) == names - WITHOUT
    assert all(field.metadata["help"] for field in fields(EngineConfig))
    engine = args("-tp", "2", "--dtype", "float32", "--no-enable-prefix-caching", "--kv-cache-memory-bytes", "1G")
    assert engine["models"][0]["engine"] == {
        "dtype": "float32",
        "kv_cache_memory_bytes": 2**30,
        "enable_prefix_caching": False,
        "tensor_parallel_size": 2,
    }


def test_flags_beside_the_engine_go_where_the_configuration_has_them():
    found = printed(
        "/models/Qwen3-8B", "--host", "0.0.0.0", "--port", "9000", "--api-keys-file", "keys", "--num-gpus", "1",
        "--accelerator-type", "L4", "--num-replicas", "3", "--reasoning-parser", "none", "--log-level", "debug",
    )  # fmt: skip
    assert found["http_options"] == {"host": "0.0.0.0", "port": 9000}
    assert found["applications"][0]["args"] == {
        "models": [
            {
                "name": "Qwen3-8B",
                "model": "/models/Qwen3-8B",
                "reasoning_parser": "none",
                "decode": {"num_replicas": 3, "num_gpus": 1.0, "accelerator_type": "L4"},
            }
        ],
        "ingress": {"api_keys_file": "keys"},
        "log_level": "debug",
    }


def test_load_may_decide_the_number_of_replicas():
    (application,) = printed("--min-replicas", "1", "--max-replicas", "4")["applications"]
    config = AppConfig.of(application)  # which raises without the policy
    assert config.models[0].decode.bounds == (1, 4)


def test_any_key_can_be_set_and_the_last_word_counts():
    found = args("--set", "ingress.num_replicas=2", "--set", "decode.routing.policy=round_robin", "--port", "1",
                 "--set", "engine.num_gpu_blocks_override=10", "--num-gpu-blocks-override", "20")  # fmt: skip
    assert found["ingress"] == {"num_replicas": 2}
    assert found["models"][0]["decode"] == {"routing": {"policy": "round_robin"}}
    assert found["models"][0]["engine"] == {"num_gpu_blocks_override": 10}


@pytest.fixture
def never_runs(monkeypatch):
    def run(serve_config: dict[str, Any], address: str | None) -> None:
        raise AssertionError("nothing may start here")

    monkeypatch.setattr(serve_command, "run", run)


@pytest.mark.usefixtures("never_runs")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "policy"], "--set must be KEY=VALUE"),
        (["--set", "name.of=1"], "name.of must be a key inside a section"),
        (["no/such/folder/at all"], "no such folder"),
        (["--max-num-seqs", "0"], "models[0].engine.max_num_seqs must be at least 1, got 0"),
        (["--set", "handoff.polic=x", "--prefill-replicas", "1"], "models[0].handoff.polic must be one of"),
        (["--api-keys-file", "/none"], "api_keys_file"),
        (["no_such_file.yaml"], "no_such_file.yaml must be a text file that can be read"),
        (["serve_config.yaml", "--port", "9000"], "MODEL must be a model, because flags cannot be combined"),
        (["serve_config.yaml", "--api-key", "sk-1"], "--api-key must be left out, as must MANTA_API_KEY"),
        (["--allowed-origins", "https://a.example"], "--allowed-origins must be JSON, a list"),
        (["--root-path", "llm"], "ingress.root_path"),
        (["--chat-template", "/none"], "chat_template must be a text file that can be read, or a template in Jinja"),
        (["--default-chat-template-kwargs", "[]"], "--default-chat-template-kwargs must be JSON, an object"),
        (["--generation-config", "/none"], "/none"),
        (
            ["--override-generation-config", '{"temprature": 1}'],
            "override_generation_config must be one of temperature",
        ),
        (["--override-generation-config", '{"top_p": 2}'], "top_p must be above 0 and at most 1, got 2"),
        (["--served-model-name", "a", "--served-model-name", "a"], "must be different from all other names, got 'a'"),
        (["--ssl-certfile", "/none", "--ssl-keyfile", "/none"], "http_options.ssl_certfile must be the absolute path"),
        (["--ssl-keyfile", "pyproject.toml"], "http_options.ssl_certfile must be the absolute path"),
        (["--ssl-certfile", "README.md", "--ssl-keyfile", "README.md"], "ssl_keyfile must be the private key of"),
    ],
)
def test_mistake_that_the_user_can_mend_is_told_before_anything_starts(arguments, message):
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert isinstance(result.exception, ServingError)
    assert message in str(result.exception)


@pytest.mark.slow
def test_mistake_is_one_line_and_exit_code_1():
    command = [sys.executable, "-m", "cluster.cli.main", "serve", "no/such/folder/at all"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("manta: model 'no/such/folder/at all': no such folder")


def test_port_that_is_in_use_is_told_before_anything_starts(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(serve_command, "_joins_a_cluster", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "--port", str(port)])
    assert str(result.exception).startswith(
        f"port {port}, for the API, is unavailable on 127.0.0.1: Address already in use. Stop"
    )


@pytest.mark.usefixtures("never_runs")
def test_too_little_memory_is_told_before_anything_starts_with_the_way_out(monkeypatch):
    monkeypatch.setattr(serve_command, "_joins_a_cluster", lambda: False)
    monkeypatch.setattr("cluster.cli.check.ports.check_port", lambda *port: Finding("ok", "port", "free"))
    for user in ("serve_config", "cli.check.model_fit"):
        monkeypatch.setattr(f"cluster.{user}.free_host_memory", lambda: FreeMemory(1000, "the box"))
    result = CliRunner().invoke(app, ["serve"])
    assert isinstance(result.exception, StartupError)
    told = str(result.exception)
    assert "do not fit into memory: only 0.00 GiB are free (the box). Raise tensor_parallel_size or pipeline_p" in told


def test_a_model_that_needs_little_is_served_without_a_closer_look():
    assert not memory_may_be_short(printed("--kv-cache-memory-bytes", "1M"))


def test_file_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    output = tmp_path / "nowhere" / "out.jsonl"
    monkeypatch.setattr("sys.argv", ["manta", "generate", "--input", str(source), "--output", str(output)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"manta: {output}: No such file or directory\n"


def test_model_s_names_template_and_defaults_are_given_as_in_vllm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("t.jinja").write_text("{{ messages }}")
    flags = [
        "org/name", "--revision", "v2", "--served-model-name", "a", "b", "--chat-template", "t.jinja",
        "--default-chat-template-kwargs", '{"enable_thinking": false}', "--generation-config", "vllm",
        "--override-generation-config", '{"temperature": 0.5}', "--max-model-len", "auto",
    ]  # fmt: skip
    assert args(*flags)["models"] == [
        {
            "name": "a",
            "model": "org/name@v2",
            "aliases": ["b"],
            "chat_template": str(tmp_path / "t.jinja"),
            "default_chat_template_kwargs": {"enable_thinking": False},
            "generation_config": "vllm",
            "override_generation_config": {"temperature": 0.5},
        }
    ]
    assert args("org/name@v2")["models"][0]["name"] == "name"


def test_a_model_in_the_current_folder_has_the_name_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert args(".")["models"][0]["name"] == tmp_path.name


def test_keys_are_given_as_in_vllm_and_only_their_hashes_are_kept(monkeypatch):
    for flags in (["pocket", "--api-key", "sk-1", "sk-2"], ["--api-key=sk-1", "--api-key=sk-2", "pocket"]):
        text = yaml.safe_dump(found := args(*flags))
        assert "sk-" not in text
        keys = AppConfig.parse(found).ingress.auth().keys()
        assert keys is not None and keys.find("sk-2").name == "key-2"
    monkeypatch.setenv("VLLM_API_KEY", "sk-3")
    keys = AppConfig.parse(args()).ingress.auth().keys()
    assert keys is not None and keys.find("sk-3").name == "key-1"


def test_certificate_is_told_to_serve_and_to_haproxy_and_a_plain_key_to_neither(monkeypatch, certificate, served):
    monkeypatch.setenv("MANTA_API_KEY", "sk-1")
    flags = ["--ssl-certfile", str(certificate.certfile), "--ssl-keyfile", str(certificate.keyfile)]
    assert printed(*flags)["http_options"]["ssl_keyfile"] == str(certificate.keyfile)
    CliRunner().invoke(app, ["serve", *flags, "--address", "auto"], catch_exceptions=False)
    assert served[0].environment["MANTA_SSL_CERTFILE"] == str(certificate.certfile)
    assert "sk-1" not in served[0].environment.values()


def test_what_is_served_is_the_configuration_that_is_printed_in_an_environment_that_the_user_may_set(
    monkeypatch, served
):
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "what the user wants")
    CliRunner().invoke(app, ["serve", "--num-gpu-blocks-override", "64", "--address", "auto"], catch_exceptions=False)
    (found,) = served
    assert (found.config, found.address) == (printed("--num-gpu-blocks-override", "64"), "auto")
    assert found.environment["RAY_SERVE_ENABLE_HA_PROXY"] == "what the user wants"


@pytest.mark.parametrize("given", [{"log_format": "json"}, {"log_level": "warning"}, {"log_level": "error"}])
def test_a_terminal_shows_plain_lines_where_those_of_the_start_are_left_out(served, monkeypatch, given):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    config = {"applications": [{"args": dict(given)}]}
    serve_command.run(config, None)
    assert [found.config for found in served] == [{"applications": [{"args": given}]}]


@pytest.mark.parametrize("variables", [{}, {"TMPDIR": "/one"}, {"TMPDIR": "/one", "RAY_TMPDIR": "/two"}])
def test_the_file_with_the_address_of_a_running_ray_is_where_ray_writes_it(monkeypatch, variables):
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(serve_command.ray_address_file()) == ray_utils.get_ray_address_file(None)


@pytest.mark.parametrize(
    ("address", "running", "value"),
    [
        (None, False, "0"),
        ("local", True, "0"),
        (None, True, None),
        ("auto", True, None),
        ("10.0.0.1:6379", False, None),
    ],
)
def test_a_ray_of_its_own_listens_on_loopback_and_one_that_runs_keeps_its_address(
    monkeypatch, tmp_path, address, running, value
):
    found = tmp_path / "ray_current_cluster"
    if running:
        found.touch()
    monkeypatch.setattr(serve_command, "ray_address_file", lambda: found)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    serve_command.set_environment({}, address)
    assert os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") == value


@pytest.mark.parametrize("ignored", [True, False])
@pytest.mark.usefixtures("served")
def test_where_ctrl_c_is_ignored_the_server_says_how_to_stop_it(monkeypatch, capsys, ignored):
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN if ignored else signal.default_int_handler)
    serve_command.run({}, None)
    assert (f"stop with: kill {os.getpid()}" in capsys.readouterr().err) is ignored
