"""Each way of leaving something behind, in a pytest of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.processes import started

ROOT = Path(__file__).parents[1]
CULPRITS = """
import os, signal, subprocess, sys
import pytest, torch, zmq
from tests import left_behind

left_behind.END_S = 0.5  # its process does not end by itself

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

def test_context():
    zmq.Context().socket(zmq.PUSH)

def test_threads():
    torch.set_num_threads(torch.get_num_threads() + 1)
"""


LONG = """
import subprocess, sys, time
import pytest

@pytest.fixture
def helper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield
    process.kill()
    process.wait()

def test_that_is_ended(helper):
    print("begins", flush=True)
    time.sleep(600)
"""


def pytest_of(folder: Path) -> list[str]:
    plugins = ("tests.left_behind", "no:cacheprovider", "no:hypothesispytest", "no:schemathesis", "no:langsmith_plugin")
    options = [word for plugin in plugins for word in ("-p", plugin)]
    return [sys.executable, "-m", "pytest", *options, "-q", "-rE", "--rootdir", str(folder), str(folder)]


def test_tests_that_are_ended_by_sigterm_end_what_they_have_started(tmp_path):
    (tmp_path / "test_long.py").write_text(LONG)
    with started([*pytest_of(tmp_path), "-s"], stdout=subprocess.PIPE, cwd=ROOT) as run:
        assert run.stdout is not None
        while "begins" not in run.stdout.readline():
            pass
        children = psutil.Process(run.pid).children()
        assert children
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 128 + signal.SIGTERM
        assert not any(child.is_running() for child in children)


@pytest.mark.slow
def test_a_test_that_leaves_something_behind_fails_and_no_other(tmp_path):
    (tmp_path / "test_culprits.py").write_text(CULPRITS)
    run = subprocess.run(pytest_of(tmp_path), capture_output=True, text=True, cwd=ROOT)
    # the last one is the module's, with all that its tests have left
    assert "9 passed, 7 errors" in run.stdout, run.stdout + run.stderr
    for name in ("default_device", "default_dtype", "environment", "handler", "process", "context"):
        assert f"ERROR at teardown of test_{name} _" in run.stdout, run.stdout
    for what in (
        "modes (default device): 0 -> 1",
        "$LEFT: absent -> 1",
        "handler of SIGTERM",
        "time.sleep(600)",
        "not closed",
    ):
        assert what in run.stdout, run.stdout
