"""Tests of kernels that passed, and whose kernels have not changed since, are skipped with `--skip-unchanged`.

To interpret or compile a Triton kernel takes seconds, and few changes touch one. A test file with the mark `kernels`
has a digest: of its own source and of all that it imports from this repository, however indirectly, and of the versions
of Python, torch, Triton and NumPy. If all of its tests passed, pytest's cache keeps the digest. A fresh clone has no
cache, and `make test-all` asks for nothing to be skipped.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("engine", "tests")
PACKAGES = ("torch", "triton", "numpy")
KEY = "manta/passed_kernel_tests"
IMPORT = re.compile(r"^([ \t]*)(?:from ([\w.]+) import (\([^)]*\)|[^\n]+)|import ([^\n]+))", re.MULTILINE)


def digest(file: Path) -> str:
    """Return the digest of a test file and of all that it imports from this repository."""
    found = hashlib.sha256(" ".join([sys.version, *map(_version, PACKAGES)]).encode())
    for source in sorted(imported_files(file)):
        found.update(f"\0{source.relative_to(ROOT)}\0".encode() + source.read_bytes())
    return found.hexdigest()


def imported_files(file: Path) -> set[Path]:
    """Return the file, those of this repository that it imports, and the conftest.py beside it."""
    found: set[Path] = set()
    todo = [file, file.with_name("conftest.py")]
    while todo:
        source = todo.pop()
        if source not in found and source.is_file():
            found.add(source)
            todo += _imports(source)
    return found


@cache
def _imports(file: Path) -> list[Path]:
    # a package's own file imports in functions what is to be had from it, for whoever asks
    outermost = file.name == "__init__.py"
    return [path for name in _imported_names(file.read_text(), outermost) for path in _files_of(name)]


def _imported_names(source: str, outermost: bool) -> Iterator[str]:
    """Yield the modules that a source imports; what comes from a module may be one itself. To parse all sources would
    take a second in each process."""
    for indent, module, names, modules in IMPORT.findall(source):
        if indent and outermost:
            continue
        parts = [part.split()[0] for part in re.sub(r"#.*|[()]", "", names or modules).split(",") if part.strip()]
        yield from [module, *(f"{module}.{name}" for name in parts)] if module else parts


def _files_of(name: str) -> Iterator[Path]:
    """Yield the files that the import of a module runs: its own, and those of the packages around it."""
    parts = name.split(".")
    if parts[0] not in OURS:
        return
    for count in range(1, len(parts) + 1):
        path = ROOT.joinpath(*parts[:count])
        yield from (file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


class UnchangedTests:
    """Skips the tests of unchanged files, and remembers those whose tests all passed."""

    def __init__(self, config: pytest.Config):
        self._cache = getattr(config, "cache", None)  # None with -p no:cacheprovider
        self._skips = config.getoption("--skip-unchanged")
        self._passed: defaultdict[Path, bool] = defaultdict(lambda: True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        files = {item.path for item in items if item.get_closest_marker("kernels")}
        known = self._known() if self._skips else {}
        unchanged = {file for file in files if known.get(_name(file)) == digest(file)}
        skip = pytest.mark.skip(reason="nothing that it imports has changed since it passed")
        for item in items:
            if item.path in unchanged:
                item.add_marker(skip)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = ROOT / report.nodeid.partition("::")[0]
        if "kernels" in report.keywords:
            self._passed[file] &= report.passed

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Only of whole files that ran whole: not with -k, with ids of tests, or in a worker, which sees a part."""
        whole = not (session.config.option.keyword or any("::" in arg for arg in session.config.args))
        ran = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not session.shouldfail
        if self._cache is None or not whole or not ran or hasattr(session.config, "workerinput"):
            return
        passed = {_name(file): digest(file) for file, passed in self._passed.items() if passed}
        if passed:
            self._cache.set(KEY, self._known() | passed)

    def _known(self) -> dict[str, str]:
        return {} if self._cache is None else self._cache.get(KEY, {})


def _name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def pytest_addoption(parser: pytest.Parser) -> None:
    message = "Skip tests of kernels that passed, and whose sources have not changed since."
    parser.addoption("--skip-unchanged", action="store_true", help=message)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(UnchangedTests(config))
