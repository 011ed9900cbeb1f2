"""Plant faults one at a time and say which test finds each: python -m tests.faults [WORD ...]

With words, only faults whose sentence or file has one of them. `--tree DIR` plants them in a copy of another checkout.
Prints the table of tests/README.md; the exit code is 1 if a fault is found by nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.faults.fault import Fault
from tests.faults.faults import FAULTS

ROOT = Path(__file__).parents[2]
FOLDERS = ("engine", "placement", "deployments", "cluster", "benchmarks", "tests", "pyproject.toml")
FAILED = re.compile(r"^(?:FAILED|ERROR) \S*?(\w+\.py(?:::\S.*?)?)(?: - .*)?$", re.MULTILINE)
TIMEOUT_S = 1800.0


def finder(fault: Fault, tree: Path) -> str | None:
    """Return the first test that fails with the fault; None if all pass. Raises RuntimeError if they cannot run."""
    unplanted = fault.plant(tree)
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-rfE", "--tb=no"]
        environment = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "1000"}
        done = subprocess.run(
            [*command, *fault.tests], cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    finally:
        (tree / fault.file).write_text(unplanted)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout}{done.stderr}")
    found = FAILED.search(done.stdout)
    return found[1] if found else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--tree", type=Path, default=ROOT)
    arguments = parser.parse_args()
    words = arguments.words or [""]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="manta-faults-") as folder:
        tree = Path(folder)
        for name in FOLDERS:
            source = arguments.tree / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, tree / name)
        print("| fault | file | found by |\n| --- | --- | --- |")
        for fault in FAULTS:
            if any(word in fault.says or word in fault.file for word in words):
                found = finder(fault, tree)
                missed += found is None
                print(f"| {fault.says} | `{fault.file}` | {f'`{found}`' if found else '**nothing**'} |", flush=True)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
