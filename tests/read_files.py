"""Notes which files of this repository tests read while they run, and which of them start processes."""

from __future__ import annotations

import os
import sys
from collections import defaultdict

from tests.reached_files import ROOT, is_made

READS = ("open", "os.listdir", "os.scandir")
STARTS = ("subprocess.Popen", "os.posix_spawn", "os.system", "os.exec")
READERS = ("<frozen importlib", "/_pytest/assertion/", "/hypothesis/")
PROCESS = "*"
"""Stands for all that a process may read."""
PREFIX = f"{ROOT}{os.sep}"
GENERAL = tuple(f"tests/{name}.py" for name in ("conftest", "left_behind", "unchanged", "reached_files"))


class ReadFiles:
    """Hears of each file that this process opens, by Python's audit events.

    of: names of files and folders, from the root of the repository, by the test file that runs, and by the source that
    reads: it may keep what it has read for the tests of another file. A process counts for all sources of tests that
    lead to it, since it may be one for many test files."""

    def __init__(self) -> None:
        self.of: defaultdict[str, set[str]] = defaultdict(set)
        self.test: str | None = None
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[object, ...]) -> None:
        if event in READS:
            name = _name(args[0])
            if name is not None and (sources := _sources()) is not None:
                self._note(name, sources[:1])
        elif event in STARTS:
            self._note(
                PROCESS,
                [source for source in _sources() or () if source.startswith("tests/") and source.count("/") > 1],
            )

    def _note(self, name: str, sources: list[str]) -> None:
        for source in [self.test, *sources]:
            if source is not None and source not in GENERAL:
                self.of[source].add(name)


def _name(path: object) -> str | None:
    """Return the name of a file of the repository; None of another one, or of what tools make."""
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if not isinstance(path, str):
        return None
    full = path if path.startswith("/") else os.path.abspath(path or ".")
    if not full.startswith(PREFIX):
        return None
    name = full.removeprefix(PREFIX)
    return None if any(part and is_made(part) for part in name.split("/")) else name


def _sources() -> list[str] | None:
    """Return the sources of this repository that led here, innermost first; None if Python imports a module, pytest
    rewrites one, or hypothesis looks for constants in all that are loaded."""
    frame, found = sys._getframe(2), list[str]()
    while frame is not None:
        file = frame.f_code.co_filename
        if not found and any(name in file for name in READERS):
            return None
        if file.startswith(PREFIX) and (name := file.removeprefix(PREFIX))[0] != ".":
            found.append(name)
        frame = frame.f_back  # type: ignore[assignment]
    return found
