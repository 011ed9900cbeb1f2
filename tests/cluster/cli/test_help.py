"""The help texts of `manta` and its commands."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from cluster.cli.main import app


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


@pytest.mark.parametrize("name", commands())
def test_help_can_be_shown(name):
    result = CliRunner().invoke(app, [*name.split(), "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_help_does_not_wait_for_ray_or_torch():
    code = "import sys, cluster.cli.main; print(sorted({'ray', 'torch', 'transformers', 'fastapi'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
