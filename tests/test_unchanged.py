"""What `--skip-unchanged` skips, in a repository of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TEST = """
import pytest
from engine.kernel import double

pytestmark = pytest.mark.kernels

def test_double():
    assert double(2) == 4

def test_nothing():
    pass
"""
OTHER = "def test_other():\n    pass\n"
CONFTEST = """
pytest_plugins = ["tests.unchanged"]

def pytest_configure(config):
    config.addinivalue_line("markers", "kernels: x")
"""
FILES = {
    "engine/__init__.py": "",
    "engine/kernel.py": "from engine.factor import TWO\n\n\ndef double(x):\n    return TWO * x\n",
    "engine/factor.py": "TWO = 2\n",
    "engine/other.py": "",
    "tests/__init__.py": "",
    "tests/conftest.py": CONFTEST,
    "tests/test_kernel.py": TEST,
    "tests/test_other.py": OTHER,
}


@pytest.fixture
def repository(tmp_path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(Path(__file__).with_name("unchanged.py"), tmp_path / "tests")
    return tmp_path


def outcome(repository: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", repository, "tests", *options]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(repository)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # it is told from the source by size and second, and both may stay
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=120)
    found = re.search(r"^(.*) in .*s$", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return found[1]


@pytest.mark.slow
def test_tests_of_kernels_are_skipped_until_something_that_they_import_changes(repository):
    skip = "--skip-unchanged"
    assert outcome(repository, skip) == "3 passed", "a fresh clone skips nothing"
    (repository / "engine/other.py").write_text("ONE = 1\n")
    assert outcome(repository, skip) == "1 passed, 2 skipped"
    assert outcome(repository) == "3 passed", "nothing is skipped unasked"
    (repository / "engine/factor.py").write_text("TWO = 3\n")
    assert outcome(repository, skip) == "1 failed, 2 passed"
    assert outcome(repository, skip) == "1 failed, 2 passed", "a file with a test that failed is not skipped"
    (repository / "engine/factor.py").write_text("TWO = 2.0\n")
    assert outcome(repository, skip, "-k", "double") == "1 passed, 2 deselected"
    assert outcome(repository, skip) == "3 passed", "a part of a file says nothing about the rest"
    assert outcome(repository, skip, "-p", "xdist", "-n", "1") == "1 passed, 2 skipped"
