"""Each way of leaving something behind, in a pytest of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CULPRITS = """
import os, signal, subprocess, sys
import pytest, torch

def test_default_device():
    torch.set_default_device("cpu")

def test_innocent():
    pass

def test_default_dtype():
    torch.set_default_dtype(torch.float64)

def test_environment():
    os.environ["LEFT"] = "1"

def test_handler():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

def test_process():
    subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"])

@pytest.fixture(scope="module")
def helper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield
    process.kill()
    process.wait()

def test_process_of_the_module(helper):
    pass

def test_threads():
    torch.set_num_threads(torch.get_num_threads() + 1)
"""


def test_a_test_that_leaves_something_behind_fails_and_no_other(tmp_path):
    (tmp_path / "test_culprits.py").write_text(CULPRITS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.left_behind", "-p", "no:cacheprovider", "-q", "-rE"]
    run = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    # the last one is the module's, with all that its tests have left
    assert "8 passed, 6 errors" in run.stdout, run.stdout + run.stderr
    for name in ("default_device", "default_dtype", "environment", "handler", "process"):
        assert f"ERROR at teardown of test_{name} _" in run.stdout, run.stdout
    for what in ("modes (default device): 0 -> 1", "$LEFT: absent -> 1", "handler of SIGTERM", "time.sleep(600)"):
        assert what in run.stdout, run.stdout
