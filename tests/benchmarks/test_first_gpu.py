"""`make first-gpu` from its first line to its last, on what stands in for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import saved
from benchmarks.gpu.first import FIRST

ROOT = Path(__file__).parents[2]
QUICK = "rms_norm or test_greedy_tokens_are_the_cpus"  # of the tests that it runs


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_first_gpu_runs_as_one_script_and_every_part_leaves_its_row(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import tests.gpu.small_first\n")
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "PYTEST_PLUGINS": "tests.gpu.stand_in",
        "PYTEST_ADDOPTS": f"-k '{QUICK}' -p no:cacheprovider",
    }
    command = [sys.executable, "-m", "benchmarks.gpu", "--first", "--limit", "3400", "--out", str(tmp_path / "out")]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3500)
    rows = {row.name: row for row in saved(tmp_path / "out")}
    assert list(rows) == [part.name for part in FIRST], found.stderr[-3000:]
    assert {name: row.problem for name, row in rows.items() if row.problem} == {}, found.stderr[-3000:]
    assert all(row.numbers for name, row in rows.items() if name != "requirements")
    assert rows["kernels compiled"].numbers["kernels"] > 10
    assert all(row.planned_s for row in rows.values()) and "| all | " in found.stderr
    assert found.returncode == 0 and found.stdout.rstrip().endswith("|"), "the table comes last"
