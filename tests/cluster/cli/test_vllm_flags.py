"""What `manta serve` says to the flags of `vllm serve`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from cluster.cli.main import app, main
from cluster.cli.vllm_flags import ANSWERS, RENAMED, translated
from engine.errors import RequestError

SERVE = get_command(app).commands["serve"]  # type: ignore[attr-defined]
OURS = {name for parameter in SERVE.params for name in (*parameter.opts, *parameter.secondary_opts)}
VLLM = [
    flag
    for line in (Path(__file__).parent / "vllm_serve_flags.txt").read_text().splitlines()
    if not line.startswith("#")
    for flag in line.split()
]


def test_every_flag_of_vllm_serve_is_ours_too_or_has_an_answer():
    assert set(VLLM) <= OURS | set(RENAMED) | set(ANSWERS), set(VLLM) - OURS - set(RENAMED) - set(ANSWERS)
    assert set(ANSWERS) <= set(VLLM), "an answer to a flag that nobody has"
    assert not OURS & (set(RENAMED) | set(ANSWERS)), "ours needs no answer"


def test_flags_that_the_answers_name_are_ours():
    named = {word.strip(":;,'()") for answer in ANSWERS.values() for word in answer.split() if word.startswith("--")}
    foreign = {"--model", "--config", "--revision"}  # quoted, or of another command
    assert named - foreign <= OURS, named - foreign - OURS
    assert set(RENAMED.values()) <= OURS


@pytest.mark.parametrize("flag", ANSWERS)
def test_flag_that_we_do_not_have_is_one_line_that_says_what_to_do(flag):
    result = CliRunner().invoke(app, ["serve", "pocket", flag, "2"])
    assert isinstance(result.exception, RequestError)
    assert str(result.exception).startswith(f"{flag} is vLLM's; ") and "\n" not in str(result.exception)


def test_flag_with_another_name_does_what_it_does_in_vllm_with_underscores_too():
    given = ["--data-parallel-size=3", "--num_gpu_blocks_override", "64", "--max_model_len", "128"]
    result = CliRunner().invoke(app, ["serve", "pocket", *given, "--print-config"])
    assert result.exit_code == 0, result.output
    (model,) = yaml.safe_load(result.stdout)["applications"][0]["args"]["models"]
    assert model["decode"]["num_replicas"] == 3
    assert model["engine"] == {"num_blocks": 64, "max_model_len": 128}


def test_values_of_vllms_mean_what_they_mean_there():
    given = ["--dtype=half", "--load-format", "safetensors", "--uvicorn-log-level", "trace", "--max-model-len", "-1"]
    result = CliRunner().invoke(app, ["serve", "pocket", *given, "--print-config"])
    assert result.exit_code == 0, result.output
    found = yaml.safe_load(result.stdout)["applications"][0]["args"]
    assert found["models"][0]["engine"] == {"dtype": "float16", "load_format": "auto"}
    assert found["log_level"] == "debug"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "pocket", "--no-such"], "manta: No such option: --no-such; see manta serve --help"),
        (["serve", "pocket", "more"], "manta: Got unexpected extra argument(s) (more); see manta serve --help"),
        (["serve", "--dtype", "int4"], "manta: Invalid value for '--dtype'"),
        (["serve", "--port"], "manta: Option '--port' requires an argument; see manta --help"),
        (["generate", "--input", "/none"], "manta: "),
        (["nonsense"], "manta: No such command 'nonsense'; see manta --help"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_1(monkeypatch, capsys, arguments, line):
    monkeypatch.setattr("sys.argv", ["manta", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(line)


def test_without_a_command_there_is_the_help(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["manta"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.count("Try it in two terminals") == 1


def test_wrong_flag_ends_with_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["manta", "serve", "pocket", "--swap-space", "4"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("manta: --swap-space is vLLM's; leave it out: KV is computed again")


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("--no-enable-lora", "leave it out: there are no LoRA adapters"),
        ("--no-enable-chunked-prefill", "leave it out: prompts are always computed in chunks"),
        ("-O3", "--torch-compile compiles"),
        ("--compilation-config.mode=3", "--torch-compile compiles"),
    ],
)
def test_every_way_to_write_a_flag_of_vllms_has_the_answer(given, answer):
    with pytest.raises(RequestError, match=answer):
        translated(given)
