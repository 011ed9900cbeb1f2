"""Test files that passed, and of which nothing has changed since, are left out with `--skip-unchanged`.

Each test file has a digest: of all files that it reaches by imports (tests/reached_files.py), of what its tests have
read besides (tests/read_files.py), and of Python and the installed packages. If all of its tests passed, pytest's cache
keeps the digest. A fresh clone has no cache, and whoever does not ask for it neither leaves anything out nor remembers
it.

A test file always runs if it, or what has come of it, cannot be known from these: one of its tests failed or was
skipped, its worker died, or a file was changed while it ran. One that starts a process depends on all files but pages
and other tests, and one that reads anything besides its imports on the names of all files.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.reached_files import ROOT, all_files, is_made, reached_files
from tests.read_files import PROCESS, ReadFiles

UNCHANGED = pytest.StashKey[frozenset[Path]]()
"""The test files that are left out, in a configuration's stash."""
VARIABLE = re.compile(r"""environ\W+(?:get\W+)?["'](TEST_\w+)""")
Reads = dict[str, list[str]]
"""What was read, as in ReadFiles."""


def digest(test: Path, reads: Reads) -> str:
    """Return the digest of all that a test file depends on."""
    files = depends_on(test, reads)
    found = hashlib.sha256(_surroundings().encode())
    if files - reached_files(test):
        found.update("\0".join(map(_name, all_files())).encode())
    for file in sorted(files):
        found.update(f"\0{_name(file)}\0{_content(file)}".encode())
    return found.hexdigest()


def depends_on(test: Path, reads: Reads) -> set[Path]:
    """Return the files, and the folders of which the names are read, that a test file depends on."""
    files = set(reached_files(test))
    read = {name for source in files for name in reads.get(_name(source), ())}
    if PROCESS in read:
        files |= {file for file in all_files() if file.suffix != ".md" and not file.is_relative_to(ROOT / "tests")}
    return files | {ROOT / name for name in read - {PROCESS}}


@cache
def _surroundings() -> str:
    installed = {name for path in sys.path if os.path.isdir(path) for name in os.listdir(path) if "-info" in name}
    return " ".join([sys.version, *sorted(installed)])


@cache
def _content(file: Path) -> str:
    """Return the digest of a file, with the variables of `make` that it reads, or of a folder's names."""
    if file.is_dir():
        return " ".join(sorted(name for name in os.listdir(file) if not is_made(name)))
    if not file.is_file():
        return "absent"
    content = file.read_bytes()
    names = VARIABLE.findall(content.decode()) if file.suffix == ".py" else ()
    return " ".join([hashlib.sha256(content).hexdigest(), *(f"{name}={os.environ.get(name)}" for name in names)])


@cache
def _changed_s(file: Path) -> float:
    return file.stat().st_mtime if file.is_file() else 0.0


def _name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


class UnchangedTests:
    """Leaves out the test files that are unchanged, and remembers those whose tests all passed.

    With `pytest -n`, the process that tests nothing decides and remembers, and its workers tell what was read."""

    def __init__(self, config: pytest.Config):
        self._cache: Any = getattr(config, "cache", None)  # None with -p no:cacheprovider
        self._began, self._complete, self._reads = time.time(), True, ReadFiles()
        self._passed: dict[str, bool] = {}  # by the name of the test file
        # a plugin that is loaded by -p changes what tests do
        self._key = " ".join(
            ["manta/unchanged", *(name for name in config.option.plugins if name.startswith("tests."))]
        )
        if hasattr(config, "workerinput"):
            unchanged = map(Path, config.workerinput["unchanged"])
        else:
            passed, reads = self._known()
            files = {ROOT / name: found for name, found in passed.items()}
            unchanged = (file for file, found in files.items() if file.is_file() and found == digest(file, reads))
        config.stash[UNCHANGED] = frozenset(unchanged)

    def pytest_report_header(self, config: pytest.Config) -> str:
        return f"left out, unchanged since they passed: {len(config.stash[UNCHANGED])} test files"

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["unchanged"] = sorted(map(str, node.config.stash[UNCHANGED]))

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        return True if collection_path in config.stash[UNCHANGED] else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool, bool]:
        self._reads.test = _name(item.path)
        try:
            return (yield)
        finally:
            self._reads.test = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.partition("::")[0]
        self._passed[test] = self._passed.get(test, True) and (report.passed or hasattr(report, "wasxfail"))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        told = getattr(node, "workeroutput", None) or {}
        self._complete &= error is None and "reads" in told
        for source, names in told.get("reads", {}).items():
            self._reads.of[source].update(names)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Remember whole files that ran whole: not with -k or ids of tests, or after Ctrl-C."""
        config = session.config
        reads = {source: sorted(names) for source, names in self._reads.of.items()}
        if hasattr(config, "workeroutput"):
            config.workeroutput["reads"] = reads
            return
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and config.stash[UNCHANGED]:
            session.exitstatus = pytest.ExitCode.OK
        whole = not (config.option.keyword or any("::" in arg for arg in config.args))
        whole &= config.option.markexpr in ("", "not slow") and not (session.shouldfail or session.shouldstop)
        if self._cache is not None and whole and self._complete and exitstatus in (0, pytest.ExitCode.TESTS_FAILED):
            self._remember(reads)

    def _known(self) -> tuple[dict[str, str], Reads]:
        """Return the digests of test files that passed, and what was read."""
        known = {} if self._cache is None else self._cache.get(self._key, {})
        return known.get("passed", {}), known.get("reads", {})

    def _remember(self, reads: Reads) -> None:
        passed, before = self._known()
        for source in before.keys() - self._passed.keys():  # a test file that has run reads what it has just read
            reads[source] = sorted({*before[source], *reads.get(source, ())})
        for test, all_passed in self._passed.items():
            passed.pop(test, None)
            if all_passed and not any(map(self._is_new, depends_on(ROOT / test, reads))):
                passed[test] = digest(ROOT / test, reads)
        self._cache.set(self._key, {"passed": passed, "reads": reads})

    def _is_new(self, file: Path) -> bool:
        return _changed_s(file) >= self._began


def pytest_addoption(parser: pytest.Parser) -> None:
    message = "Leave out test files that passed, and of which nothing that they depend on has changed since."
    parser.addoption("--skip-unchanged", action="store_true", help=message)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--skip-unchanged"):
        config.pluginmanager.register(UnchangedTests(config))
