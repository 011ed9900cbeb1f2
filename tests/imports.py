"""What a file of the repository imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Outline(NamedTuple):
    """modules: full names of everything that is imported anywhere, functions and TYPE_CHECKING blocks included.
    classes: those inside functions too, each with the number of arguments that its own constructor takes."""

    modules: set[str]
    classes: list[tuple[str, int]]


@cache
def outline(source: str) -> Outline:
    found = Outline(set(), [])
    for node in statements(source):
        if isinstance(node, ast.Import):
            found.modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            found.modules.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            made_by = [each.args for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
            counts = [len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1 for given in made_by]
            found.classes.append((node.name, max(counts, default=0)))
    return found


def imported_modules(source: str) -> set[str]:
    return outline(source).modules


def statements(source: str) -> Iterator[ast.AST]:
    """Yield all statements, those inside others too, without what they are made of, which is most of a tree."""
    todo: list[ast.AST] = [ast.parse(source)]
    while todo:
        node = todo.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            todo += getattr(node, name, ())


def imported_packages(source: str) -> set[str]:
    return {module.split(".")[0] for module in imported_modules(source)}


@cache
def imported_files(file: Path) -> set[Path]:
    """Files of the repository that a file imports, functions and TYPE_CHECKING blocks included."""
    found = set()
    for module in imported_modules(file.read_text(encoding="utf-8")):
        path = ROOT.joinpath(*module.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py", path.parent.with_suffix(".py")):
            if candidate.is_relative_to(ROOT) and candidate.is_file() and candidate != file:
                found.add(candidate)
                break
    return found
