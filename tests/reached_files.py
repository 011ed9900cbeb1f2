"""The files of this repository that a test file reaches: what it imports, however indirectly, and what lies beside it.

Found by reading sources, never by importing them. Too much is found rather than too little: imports in functions count,
and where a module's name is computed, all modules of its folder do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = ("manta", "engine", "placement", "deployments", "cluster", "benchmarks", "tools", "tests")
IMPORT = re.compile(r"^([ \t]*)(?:from ([\w.]+) import (\([^)]*\)|[^\n]+)|import ([^\n]+))", re.MULTILINE)
NAMED = re.compile(rf"""["']((?:{"|".join(OURS)})(?:\.\w+)+|\.+[a-z_][\w.]*)""")
"""A module in a string, from the top or with the dots of a relative import: in a table, for a patch or a process."""
FOR_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t]+.*\n|\n)+", re.MULTILINE)
COMPUTED = re.compile(r"""f["']((?:\{__package__\}|[\w.]+)?\.)\{""")
"""The start of a module's name that ends with what is in braces."""


@cache
def reached_files(test: Path) -> frozenset[Path]:
    """Return a test file and the files of this repository that it can reach by imports, the conftest.py of its folders,
    and what lies beside all of these and is neither a source nor a page: tables, templates, models."""
    folders = [folder for folder in test.parents if folder.is_relative_to(ROOT)]
    found, asked = set[Path](), set[str]()
    todo = [test, *(folder / name for folder in folders for name in ("conftest.py", "__init__.py"))]
    while todo:
        source = todo.pop()
        if source not in found and source.is_file():
            found.add(source)
            todo += _imports(source)
            asked |= _parameters(source)
        if not todo:
            fixtures = [each for folder in folders for each in _fixtures(folder / "conftest.py").items()]
            todo = [file for name, files in fixtures if name in asked for file in files if file not in found]
    for folder in {source.parent for source in found} - {ROOT}:
        found.update(_beside(folder))
    return frozenset(found)


@cache
def _parameters(source: Path) -> frozenset[str]:
    """Return the names of parameters of functions in a source that knows pytest. They may be fixtures."""
    text = source.read_text(encoding="utf-8")
    heads = re.findall(r"^ *(?:async )?def \w+\(([^)]*)\)", text, re.MULTILINE) if "\nimport pytest\n" in text else ()
    return frozenset(name for head in heads for name in re.findall(r"\w+", head))


@cache
def _fixtures(conftest: Path) -> dict[str, tuple[Path, ...]]:
    """Return what each function of a conftest.py imports by itself."""
    text = conftest.read_text(encoding="utf-8") if conftest.is_file() else ""
    found = {}
    for name, body in re.findall(r"^(?:async )?def (\w+)(\(.*\n(?:[ \t)].*\n|\n)*)", text, re.MULTILINE):
        names = _imported_names(body, within_functions=True)
        found[name] = tuple(file for imported in names for file in _files_of(imported))
    return {name: files for name, files in found.items() if files}


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
        folders = [ROOT.joinpath(*_absolute(start, package).split(".")) for start in COMPUTED.findall(text)]
        found += [path for folder in folders for path in _below(folder)]
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
