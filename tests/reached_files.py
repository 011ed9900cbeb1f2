"""The files of this repository that a test file reaches: what it imports, however indirectly, and what lies beside it.

Found by reading sources, never by importing them. Too much is found rather than too little: imports in functions count,
and where a module's name is computed, all modules of its folder do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = ("manta", "engine", "placement", "deployments", "cluster", "benchmarks", "tools", "tests")
IMPORT = re.compile(r"^([ \t]*)(?:from ([\w.]+) import (\([^)]*\)|[^\n]+)|import ([^\n]+))", re.MULTILINE)
NAMED = re.compile(rf"""["']((?:{"|".join(OURS)})(?:\.\w+)+|\.+[a-z_][\w.]*)""")
"""A module in a string, from the top or with the dots of a relative import: in a table, for a patch or a process."""
FOR_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t]+.*\n|\n)+", re.MULTILINE)
FUNCTION = re.compile(r"((?:^@.*\n)*)^(?:async )?def (\w+)(\(.*\n(?:[ \t)].*\n|\n)*)", re.MULTILINE)
ASKED = re.compile(r"(?:usefixtures|getfixturevalue)\((.*)\)")
COMPUTED = re.compile(r"""f["']((?:\{__package__\}|[\w.]+)?\.)(\{[^"']*)["']""")
"""A module's name with parts in braces: what stands before the first of them, and the rest."""


@cache
def reached_files(test: Path) -> frozenset[Path]:
    """Return a test file and the files of this repository that it can reach by imports, the conftest.py of its folders,
    and what lies beside all of these and is neither a source nor a page: tables, templates, models."""
    folders = [folder for folder in test.parents if folder.is_relative_to(ROOT)]
    fixtures = [fixture for folder in folders for fixture in _fixtures(folder / "conftest.py")]
    found, asked = set[Path](), set[str]()
    todo = [test, *(folder / name for folder in folders for name in ("conftest.py", "__init__.py"))]
    while todo:
        source = todo.pop()
        if source not in found and source.is_file():
            found.add(source)
            todo += _imports(source)
            asked |= _parameters(source)
        if not todo:
            while used := [each for each in fixtures if each.is_used(asked) and not each.asks <= asked]:
                asked.update(*(each.asks for each in used))
            todo = [file for each in fixtures if each.is_used(asked) for file in each.imports if file not in found]
    for folder in {source.parent for source in found} - {ROOT}:
        found.update(_beside(folder))
    return frozenset(found)


@dataclass(frozen=True)
class Fixture:
    """A function of a conftest.py: a fixture, or what pytest or another one calls."""

    name: str
    always: bool
    """Whether it may run for every test."""
    asks: frozenset[str]
    """The names of its parameters, which may be fixtures."""
    imports: tuple[Path, ...]
    """The files that it imports by itself."""

    def is_used(self, asked: Collection[str]) -> bool:
        return self.always or self.name in asked


@cache
def _fixtures(conftest: Path) -> tuple[Fixture, ...]:
    text = conftest.read_text(encoding="utf-8") if conftest.is_file() else ""
    found = []
    for decorators, name, body in FUNCTION.findall(text):
        names = _imported_names(body, within_functions=True)
        imports = tuple(file for imported in names for file in _files_of(imported))
        always = "fixture" not in decorators or "autouse=True" in decorators
        found.append(Fixture(name, always, frozenset(_words(body.partition(")")[0])), imports))
    return tuple(found)


@cache
def _parameters(source: Path) -> frozenset[str]:
    """Return the names of parameters of functions in a source that knows pytest, which may be fixtures."""
    text = source.read_text(encoding="utf-8")
    if source.name == "conftest.py" or "\nimport pytest\n" not in text:
        return frozenset()
    heads = re.findall(r"^ *(?:async )?def \w+\(([^)]*)\)", text, re.MULTILINE)
    return frozenset(_words(" ".join([*heads, *ASKED.findall(text)])))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


@cache
def all_files() -> tuple[Path, ...]:
    """Return what is in this repository, sorted, but what tools put there."""
    found: list[Path] = []
    for folder, inside, names in os.walk(ROOT):
        inside[:] = [name for name in inside if not is_made(name)]
        found += [Path(folder, name) for name in names if name[0] != "."]
    return tuple(sorted(found))


def is_made(name: str) -> bool:
    """Whether tools make a folder of this name, or a file in it, while tests run."""
    return name[0] == "." or name in ("build", "__pycache__", "node_modules") or name.endswith(".egg-info")


@cache
def _imports(file: Path) -> tuple[Path, ...]:
    text, package = FOR_TYPES.sub("", file.read_text(encoding="utf-8")), file.relative_to(ROOT).parts[:-1]
    names = list(_imported_names(text, within_functions=file.name not in ("__init__.py", "conftest.py")))
    found = [path for name in names for path in _files_of(name)]
    if file.name != "__init__.py":  # in whose docstring may be an example of itself
        found += [path for name in names for path in _given(name)]
    for name in NAMED.findall(text):
        # a table may lie deeper than what imports its rows
        places = [_absolute(name, package[:end]) for end in range(len(package), 0, -1)] if name[0] == "." else [name]
        found += [path for place in places for path in _files_of(place)]
    if "import_module(" in text:
        for start, rest in COMPUTED.findall(text):
            found += _computed(_absolute(start, package), rest)
    if "walk_packages(" in text:
        found += [path for name in names for path in _below(ROOT.joinpath(*name.split(".")))]
    return tuple(set(found))


def _imported_names(text: str, within_functions: bool) -> Iterator[str]:
    """Yield the modules that a source imports; what comes from a module may be one itself. To parse all sources would
    take seconds."""
    for indent, module, names, modules in IMPORT.findall(text):
        if indent and not within_functions:
            continue
        parts = [part.split()[0] for part in re.sub(r"#.*|[()]", "", names or modules).split(",") if part.strip()]
        yield from [f"{module}.{name}" for name in parts] if module else parts


@cache
def _files_of(name: str) -> tuple[Path, ...]:
    """Return the files that the import of a module runs: its own, and those of the packages around it.

    What comes behind a module in the name is left out."""
    parts, found = name.split("."), list[Path]()
    for count in range(1, len(parts) + 1 if parts[0] in OURS else 1):
        path = ROOT.joinpath(*parts[:count])
        found += [file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()]
    return tuple(found)


@cache
def _given(name: str) -> tuple[Path, ...]:
    """Return the files of what a package itself gives, such as `engine.LLM`, which it imports when it is asked for."""
    top, _, rest = name.partition(".")
    package = ROOT / top / "__init__.py"
    if top not in OURS or "." in rest or not package.is_file() or (rest and len(_files_of(name)) > 1):
        return ()
    text = package.read_text(encoding="utf-8")
    names = _imported_names(text, within_functions=True) if "def __getattr__" in text else ()
    return tuple(file for other in names for file in _files_of(other))


def _absolute(name: str, package: Iterable[str]) -> str:
    """Return the full name of a module or package that may be relative to a package."""
    own = [*package]
    if name.startswith("{__package__}"):
        return ".".join([*own, *filter(None, name.removeprefix("{__package__}").split("."))])
    rest = name.lstrip(".")
    up = len(name) - len(rest)
    return ".".join([*(own[: len(own) - up + 1] if up else []), *filter(None, rest.split("."))])


def _computed(package: str, rest: str) -> Iterator[Path]:
    """Yield the files of the modules below a package that a name with braces may mean. One at its end may have dots."""
    folder = ROOT.joinpath(*package.split("."))
    pattern = re.sub(r"(\{[^}]*\})+", "*", rest).replace(".", "/")
    for path in folder.glob(f"{pattern}.py") if not rest.endswith("}") else _below(folder):
        yield from _files_of(".".join(path.relative_to(ROOT).with_suffix("").parts))


def _below(folder: Path) -> Iterator[Path]:
    """Yield the sources below a folder of ours that is a package."""
    if folder != ROOT and folder.is_relative_to(ROOT) and (folder / "__init__.py").is_file():
        yield from folder.rglob("*.py")


@cache
def _beside(folder: Path) -> tuple[Path, ...]:
    """Return the files in a folder, and in those in it without sources, that are neither sources nor pages."""
    found: list[Path] = []
    for path, inside, names in os.walk(folder):
        here = Path(path)
        if here != folder and any(name.endswith(".py") for name in names):
            inside.clear()
            continue
        inside[:] = [name for name in inside if not is_made(name)]
        found += [here / name for name in names if not name.endswith((".py", ".md")) and name[0] != "."]
    return tuple(found)
