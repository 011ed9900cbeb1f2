"""What a file of the repository imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent


@cache
def imported_modules(source: str) -> set[str]:
    """Full names of everything that is imported anywhere, functions and TYPE_CHECKING blocks included."""
    modules = set()
    for node in statements(source):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


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
