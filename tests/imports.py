"""What a file of the repository imports."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent


@cache
def imported_modules(source: str) -> set[str]:
    """Full names of everything that is imported anywhere, functions and TYPE_CHECKING blocks included."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def imported_packages(source: str) -> set[str]:
    return {module.split(".")[0] for module in imported_modules(source)}


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
