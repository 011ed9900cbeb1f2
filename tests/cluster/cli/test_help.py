"""The help texts of `manta` and its commands."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields

import pytest
import typer
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.config.flag_groups import COMMON, GROUP_OF, GROUPS
from cluster.flags import engine_flags
from cluster.serve_flags import ModelFlags, ReplicaFlags, ServerFlags
from engine.errors import InvalidParameter

WIDTH = 80  # of CliRunner's terminal
WITH_ENGINE = ["serve", "generate", "gpu-check", "bench offline"]


def commands() -> dict[str, str]:
    """Docstrings of all commands, by how they are called."""
    found = {}
    for command in app.registered_commands:
        assert command.callback is not None
        found[command.name or command.callback.__name__] = command.callback.__doc__ or ""
    for group in app.registered_groups:
        assert group.typer_instance is not None
        for command in group.typer_instance.registered_commands:
            assert command.callback is not None
            name = f"{group.name} {command.name or command.callback.__name__}"
            found[name] = command.callback.__doc__ or ""
    return found


def test_all_commands_of_the_issue_are_there_and_each_stands_in_a_group():
    group = typer.main.get_command(app)
    names = {
        "serve",
        "chat",
        "bench",
        "generate",
        "explain",
        "doctor",
        "check",
        "hash-key",
        "k8s",
        "simulate",
        "models",
    }
    assert names <= set(group.commands)  # type: ignore[attr-defined]
    ungrouped = [command.callback.__name__ for command in app.registered_commands if not command.rich_help_panel]
    assert ungrouped == []


@pytest.mark.parametrize("name", commands())
def test_help_of_a_command_has_an_example_of_that_command(name):
    _, example, rest = commands()[name].partition("Example")
    assert example, f"manta {name} has no example"
    assert f"manta {name}" in rest


def shown(name: str, help: str) -> str:
    result = CliRunner().invoke(app, [*name.split(), help], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def flags_of(name: str) -> dict[str, str]:
    """Headings in the help by all names of a command's flags."""
    command = typer.main.get_command(app)
    for word in name.split():
        command = command.commands[word]  # type: ignore[attr-defined]
    return {
        flag: getattr(parameter, "rich_help_panel", None) or "Options"
        for parameter in command.params
        if parameter.param_type_name == "option"
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }


def told(help: str) -> set[str]:
    """Flags that a help text explains."""
    lines = re.findall(r"^  (-.*?)(?:  .*)?$", help, re.MULTILINE)
    return {word.rstrip(",") for line in lines for word in line.split() if re.fullmatch(r"-[\w-]+,?", word)}


@pytest.mark.parametrize("name", commands())
def test_every_flag_stands_whole_in_the_help_of_all_and_no_line_is_cut_or_too_long(name):
    whole = shown(name, "--help=all")
    assert whole.startswith(f"Usage: manta {name} ") or whole.startswith(f"Usage: root {name} ")
    assert told(whole) == {*flags_of(name), "--help"}
    for text in (whole, shown(name, "--help")):
        assert "…" not in text and max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize("name", commands())
def test_the_help_of_a_command_without_engine_flags_is_whole(name):
    if name not in WITH_ENGINE:
        assert shown(name, "--help") == shown(name, "--help=all")


@pytest.mark.parametrize("name", WITH_ENGINE)
def test_the_help_of_a_command_with_engine_flags_is_short_and_names_all_groups(name):
    short, headings = shown(name, "--help"), flags_of(name)
    assert len(short.splitlines()) <= 100
    common = {
        flag for flag, heading in headings.items() if heading not in GROUPS or flag[2:].replace("-", "_") in COMMON
    }
    assert common <= told(short) < {*headings, "--help"}
    named = re.findall(r"^  (\w+) ", short.partition("Groups of flags:")[2], re.MULTILINE)
    assert named == [group for group in GROUPS if group in headings.values()]


@pytest.mark.parametrize("name", [*WITH_ENGINE, "simulate", "bench serve"])
def test_every_group_of_flags_is_shown_alone_however_it_is_spelt(name):
    headings = flags_of(name)
    for group in {*headings.values()}:
        text = shown(name, f"--help={group.upper()}")
        assert told(text) - {"--help"} == {flag for flag, heading in headings.items() if heading == group}
        assert text.startswith(f"{group}:\n")


@pytest.mark.parametrize("word", ["max-model-len", "max_model_len", "--max-model-len", "MODEL-LEN"])
def test_a_flag_is_explained_by_its_name_or_a_part_of_it(word):
    assert told(shown("serve", f"--help={word}")) == {"--max-model-len"}
    assert told(shown("gpu-check", "--help=parallel-size")) == {
        *("-tp", "--tensor-parallel-size", "-pp", "--pipeline-parallel-size", "--data-parallel-size")
    }


def test_an_unknown_group_is_refused_with_the_list_of_groups():
    with pytest.raises(InvalidParameter) as refused:
        shown("serve", "--help=NoSuchConfig")
    assert all(group in str(refused.value) for group in GROUPS) and "nosuchconfig" in str(refused.value)


def test_every_flag_of_the_engine_and_of_a_server_is_in_one_group():
    of_server = {field.name for flags in (ModelFlags, ServerFlags, ReplicaFlags) for field in fields(flags)}
    assert set(GROUP_OF) == of_server | {flag.name for flag in engine_flags()}, "cluster/config/flag_groups.py"
    assert sum(len(flags.split()) for _, flags in GROUPS.values()) == len(GROUP_OF)
    assert set(COMMON) <= set(GROUP_OF)


def test_help_does_not_wait_for_ray_or_torch():
    code = "import sys, cluster.cli.main; print(sorted({'ray', 'torch', 'transformers', 'fastapi'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
