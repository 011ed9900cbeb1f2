"""Runs tests in a process without some parts, as if a commit had deleted their folders and their rows in the table:

python -m tests.left_out deployments.parts adapters,holds tests/deployments/test_app.py
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

import pytest


def is_inside(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


class LeftOut(MetaPathFinder):
    """Finds no module of the parts, and a table that does not know them."""

    def __init__(self, room: str, parts: Sequence[str]):
        """room: package with a folder for each part, and with the table."""
        self._table, self._parts = f"{room}.table", parts
        self._packages = [f"{room}.{part}" for part in parts]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if is_inside(fullname, self._packages):
            raise ModuleNotFoundError(f"{fullname} is left out", name=fullname)
        if fullname != self._table or (spec := PathFinder.find_spec(fullname, path)) is None:
            return None
        assert spec.origin is not None
        spec.loader = TableLoader(fullname, spec.origin, Deletion(self._packages, self._parts))
        return spec


class TableLoader(SourceFileLoader):
    """Loads a table after deleting rows."""

    def __init__(self, fullname: str, path: str, deletion: Deletion):
        super().__init__(fullname, path)
        self._deletion = deletion

    def get_code(self, fullname: str) -> CodeType:
        tree = self._deletion.visit(ast.parse(self.get_data(self.path), self.path))
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


class Deletion(ast.NodeTransformer):
    """Deletes imports of packages, and the calls whose first argument is the name of a part, from a module."""

    def __init__(self, packages: Sequence[str], parts: Sequence[str]):
        self._packages, self._parts = packages, parts

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        return ast.copy_location(ast.Pass(), node) if is_inside(node.module or "", self._packages) else node

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        kept = [entry for entry in node.elts if not self._names_part(entry)]
        return ast.copy_location(ast.Tuple(kept, node.ctx), node)

    def _names_part(self, node: ast.expr) -> bool:
        first = node.args[0] if isinstance(node, ast.Call) and node.args else None
        return isinstance(first, ast.Constant) and first.value in self._parts


if __name__ == "__main__":
    room, names, *arguments = sys.argv[1:]
    sys.meta_path.insert(0, LeftOut(room, names.split(",")))
    sys.exit(pytest.main([*arguments, "-p", "no:cacheprovider"]))
