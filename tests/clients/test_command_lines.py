"""Codex and Claude Code, which let the model run a command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAMS = Path(os.environ.get("NPM_BIN", "build/clients/node_modules/.bin")).resolve()
COMMAND = "echo $((40 + 2))"


def run(command: list[str], folder: Path, **environment: str) -> str:
    program = shutil.which(command[0], path=PROGRAMS)
    assert program, f"{command[0]} is not in {PROGRAMS}"
    variables = {"PATH": os.environ["PATH"], "HOME": str(folder), **environment}
    done = subprocess.run(
        [program, *command[1:]],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_codex_runs_a_command_and_answers(server, tmp_path):
    settings = {
        "model": "obedient",
        "model_provider": "manta",
        "model_providers.manta": f'{{name="manta", base_url="{server}/v1", wire_api="responses"}}',
    }
    options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
    call = f"call exec_command {json.dumps({'cmd': COMMAND})}"
    output = run(
        ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *options, call],
        tmp_path,
    )
    assert "The tool said" in output
    assert "42" in output


@pytest.mark.parametrize("form", ["text", "stream-json"])
def test_claude_code_runs_a_command_and_answers(server, tmp_path, form):
    call = f"call Bash {json.dumps({'command': COMMAND, 'description': 'Add'})}"
    options = ["--allowedTools", "Bash", "--model", "obedient", "--output-format", form, "--verbose"]
    output = run(
        ["claude", "-p", call, *options],
        tmp_path,
        ANTHROPIC_BASE_URL=server,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_SMALL_FAST_MODEL="obedient",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert "42" in output
