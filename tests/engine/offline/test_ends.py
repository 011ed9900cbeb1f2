"""What an engine in a user's own process leaves of its tape when the process ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import LLM
from engine.parts.tape import shared_copy
from engine.parts.tape.shared_copy import SHARED_MEMORY
from tests.processes import started

ENDS = {
    "the script ends": "pass",
    "it closes the engine": "llm.close()",
    "sys.exit": "sys.exit(3)",
    "an error of the user's": "raise ValueError('of the user')",
    "Ctrl-C": "signal.raise_signal(signal.SIGINT)",
    "it drops the engine": "del llm; assert not copies()",
    "a fork of it ends first": "if not (fork := os.fork()): sys.exit()\nos.waitpid(fork, 0)\nassert copies(), 'gone'",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
}
CODES = {"sys.exit": 3, "an error of the user's": 1, "Ctrl-C": -signal.SIGINT, "killed": -signal.SIGKILL}
SCRIPT = """
import json, os, signal, sys, tempfile
from pathlib import Path
from engine import LLM, SamplingParams
from engine.parts.tape import shared_copy

folder, root, ends = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])


def load(**options):
    tape_dir = str(shared_copy.SHARED_MEMORY / "kept")
    return LLM(folder, num_threads=1, num_gpu_blocks_override=64, device="cpu", tape_dir=tape_dir, **options)


def copies():
    return sorted(folder.name for folder in shared_copy.SHARED_MEMORY.glob("manta-tapes-*/*"))


load(tape_mib=0).close()  # imports what children would import again
children = {}
for name, end in ends.items():
    shared_copy.SHARED_MEMORY = Path(tempfile.mkdtemp(dir=root))
    if not (child := os.fork()):
        llm = load()
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3), use_tqdm=False)
        assert copies(), "the engine keeps no tape"
        exec(end)
        break
    children[name] = child, shared_copy.SHARED_MEMORY
else:
    found = {}
    for name, (child, shared_copy.SHARED_MEMORY) in children.items():
        _, status = os.waitpid(child, 0)
        found[name] = os.waitstatus_to_exitcode(status), copies()
    print(json.dumps(found))
"""


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        yield Path(folder)


@pytest.mark.slow
def test_a_process_that_ends_by_itself_leaves_no_tape_however_it_ends_and_a_killed_one_does(folder, root):
    command = [sys.executable, "-c", SCRIPT, str(folder), str(root), json.dumps(ENDS)]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        output, _ = process.communicate(timeout=240)
    found = json.loads(output)
    assert {name: code for name, (code, _) in found.items() if code} == CODES
    left = {name: copies for name, (_, copies) in found.items() if copies}
    assert list(left) == ["killed"]
    (copy,) = left["killed"]
    assert copy.startswith(f"{folder.name}."), "it has the model's name"
    assert not [*root.glob("*/kept")]


def test_the_tape_of_a_model_in_the_current_folder_has_the_name_of_the_folder(folder, root, monkeypatch):
    monkeypatch.setattr(shared_copy, "SHARED_MEMORY", root)
    monkeypatch.chdir(folder)
    with LLM(".", num_threads=1, num_gpu_blocks_override=64, device="cpu"):
        (copy,) = root.glob("manta-tapes-*/*")
    assert copy.name.startswith(f"{folder.name}.")
