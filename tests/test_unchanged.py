"""What `--skip-unchanged` leaves out, in a repository of its own, and what a change of one line in this one reaches."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reached_files import ROOT, reached_files

CONFTEST = 'pytest_plugins = ["tests.unchanged"]\n'
PARTS = """
from importlib import import_module

def parts():
    return [import_module(f"engine.parts.{name}.make").NAME for name in ("one",)]
"""
TESTS = {
    "kernel": "from engine.core import TWO\n\ndef test_two():\n    assert TWO == 2\n\ndef test_nothing():\n    pass\n",
    "parts": "from engine.parts.table import parts\n\ndef test_parts():\n    assert parts() == ['one']\n",
    "page": "from tests.pages import page\n\ndef test_page():\n    assert 'two' in page()\n",
    "same_page": "from tests.pages import page\n\ndef test_page():\n    assert page().startswith('one')\n",
    "process": """
import subprocess, sys

def test_process():
    subprocess.run([sys.executable, "-m", "engine.main"], check=True)
""",
    "skipped": "import pytest\n\n@pytest.mark.skip\ndef test_skipped():\n    pass\n",
}
FILES = {
    "engine/__init__.py": "",
    "engine/core.py": "from engine.numbers import TWO\n",
    "engine/numbers.py": "TWO = 2\n",
    "engine/main.py": "print(1)\n",
    "engine/parts/__init__.py": "",
    "engine/parts/table.py": PARTS,
    "engine/parts/one/__init__.py": "",
    "engine/parts/one/make.py": "NAME = 'one'\n",
    "docs/page.md": "one two\n",
    "tests/__init__.py": "",
    "tests/conftest.py": CONFTEST,
    "tests/plugin.py": "",
    "tests/pages.py": """
from functools import cache
from pathlib import Path

@cache
def page():
    return Path(__file__).parents[1].joinpath("docs", "page.md").read_text()
""",
    **{f"tests/test_{name}.py": source for name, source in TESTS.items()},
}
ALL = set(TESTS)
ALWAYS = {"skipped"}


@pytest.fixture
def repository(tmp_path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (0, 0))
    for name in ("unchanged.py", "read_files.py", "reached_files.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
        os.utime(tmp_path / "tests" / name, (0, 0))
    return tmp_path


def ran(repository: Path, *options: str, skip: bool = True, fails: bool = False) -> set[str]:
    """Run the tests there, and return what the names of the files that ran have after `test_`."""
    command = [sys.executable, "-m", "pytest", "-v", "--rootdir", repository, "tests", *options]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(repository)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # it is told from the source by size and second, and both may stay
    done = subprocess.run(
        [*command, *(["--skip-unchanged"] if skip else [])],
        cwd=repository, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == fails, done.stdout + done.stderr
    return set(re.findall(r"tests/test_(\w+)\.py::", done.stdout))


def change(repository: Path, name: str, text: str) -> None:
    (repository / name).write_text(text)
    os.utime(repository / name, (1, 1))


def test_a_test_file_is_left_out_until_something_that_it_depends_on_changes(repository):
    assert ran(repository) == ALL, "a fresh clone leaves nothing out"
    assert ran(repository) == ALWAYS
    change(repository, "engine/numbers.py", "TWO = 2.0\n")
    assert ran(repository) == {"kernel", "process", *ALWAYS}
    change(repository, "engine/parts/one/make.py", "NAME = 'o' + 'ne'\n")
    assert ran(repository) == {"parts", "process", *ALWAYS}
    change(repository, "docs/page.md", "one, two\n")
    assert ran(repository) == {"page", "same_page", *ALWAYS}, "also where another file's test has read it"


@pytest.mark.slow
def test_what_failed_or_ran_in_part_is_not_left_out(repository):
    assert ran(repository, skip=False) == ALL
    assert ran(repository) == ALL, "what nobody asks to remember is not remembered"
    assert ran(repository, skip=False) == ALL, "nothing is left out unasked"
    change(repository, "engine/numbers.py", "TWO = 3\n")
    assert ran(repository, fails=True) == {"kernel", "process", *ALWAYS}
    assert ran(repository, fails=True) == {"kernel", *ALWAYS}
    change(repository, "engine/numbers.py", "TWO = 2\n")
    assert ran(repository, "-k", "nothing") == {"kernel"}
    assert ran(repository, "-p", "xdist", "-n", "1") == {"kernel", "process", *ALWAYS}, "a part tells nothing of all"
    assert ran(repository, "-p", "xdist", "-n", "1") == ALWAYS
    assert ran(repository, "-p", "tests.plugin") == ALL, "what passed without a plugin of ours may fail with it"
    assert ran(repository, "-p", "tests.plugin") == ran(repository) == ALWAYS
    assert ran(repository, "--ignore", "tests/test_skipped.py") == set(), "nothing to run is no failure"


@pytest.mark.parametrize(
    ("changed", "reached", "not_reached"),
    [
        pytest.param(
            "engine/core/scheduler.py",
            ["engine/core/test_scheduler.py", "engine/offline/test_llm.py", "days/test_days.py"],
            ["engine/text/test_tokenizer_bounds.py", "engine/model/layers/test_norm.py", "placement/test_spec.py"],
            id="kernel",
        ),
        pytest.param(
            "engine/parts/thinking_budget/make.py",
            ["engine/core/test_engine.py", "composition/test_pairs.py", "engine/offline/test_llm.py"],
            [
                "engine/core/test_block_pool.py",
                "cluster/cli/test_explain.py",
                "engine/text/test_chat_template.py",
            ],
            id="leaf part, which a table names",
        ),
        pytest.param(
            "engine/model/models/qwen3.py",
            ["engine/model/test_parity.py"],
            ["engine/model/layers/test_rope.py", "engine/text/test_tokenizer.py", "placement/test_capacity.py"],
            id="model, which a table names",
        ),
        pytest.param(
            "tests/models.py",
            ["engine/lora/test_bucket.py", "engine/core/test_engine.py"],
            ["engine/core/test_block_pool.py", "engine/fairness/test_fair_queue.py", "test_kernel.py"],
            id="what a fixture of all tests imports",
        ),
        pytest.param(
            "tests/cluster/vllm/recipes.yaml", ["cluster/vllm/test_recipes.py"], ["cluster/test_config.py"], id="table"
        ),
    ],
)
def test_a_change_reaches_the_tests_that_it_can_break(changed, reached, not_reached):
    file = ROOT / changed
    assert file.is_file()
    for name in (*reached, *not_reached):
        assert (ROOT / "tests" / name).is_file(), name
        assert (file in reached_files(ROOT / "tests" / name)) == (name in reached), name
