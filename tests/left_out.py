"""Runs tests in a process without some packages, as if a commit had deleted them and their lines in tables:

python -m tests.left_out --tables deployments.parts.table --packages deployments.parts.holds -- tests/deployments
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

import pytest


def command(tables: Sequence[str], packages: Sequence[str], tests: Sequence[str]) -> list[str]:
    """Return the command line that runs tests without some packages, or modules. tables: modules that may import
    them."""
    given = ["--tables", ",".join(tables), "--packages", ",".join(packages)]
    return [sys.executable, "-m", "tests.left_out", *given, "--", *tests]


def is_inside(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


class LeftOut(MetaPathFinder):
    """Finds no module of some packages, and tables that do not name what is there."""

    def __init__(self, tables: Sequence[str], packages: Sequence[str]):
        self._tables, self._packages = tables, packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if is_inside(fullname, self._packages):
            raise ModuleNotFoundError(f"{fullname} is left out", name=fullname)
        if fullname not in self._tables or (spec := PathFinder.find_spec(fullname, path)) is None:
            return None
        assert spec.origin is not None
        spec.loader = TableLoader(fullname, spec.origin, self._packages)
        return spec


class TableLoader(SourceFileLoader):
    """Loads a table without the lines that name something of some packages."""

    def __init__(self, fullname: str, path: str, packages: Sequence[str]):
        super().__init__(fullname, path)
        self._packages = packages

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path), self.path)
        tree = Deletion(self._packages).visit(tree)
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


class Deletion(ast.NodeTransformer):
    """Deletes imports of packages from a module, and what names something that they have imported: entries of displays
    and arguments outside functions. What else names it stays, and is an error
    if it is reached."""

    def __init__(self, packages: Sequence[str]):
        self._packages = packages
        self._gone = {package.rpartition(".")[2] for package in packages}  # tables name parts by their folders
        self._names = set[str]()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if not is_inside(node.module or "", self._packages):
            return node
        self._names |= {alias.asname or alias.name for alias in node.names}
        return ast.copy_location(ast.Pass(), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node

    def visit_List(self, node: ast.List) -> ast.AST:
        node.elts = [entry for entry in node.elts if not self._is_gone(entry)]
        return node

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        gone = self._gone
        node.elts = [
            entry
            for entry in node.elts
            if not (self._is_gone(entry) or (isinstance(entry, ast.Constant) and entry.value in gone))
        ]
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        kept = [
            (key, value)
            for key, value in zip(node.keys, node.values, strict=True)
            if not (self._is_gone(value) or (key is not None and self._is_gone(key)))
        ]
        node.keys, node.values = [key for key, _ in kept], [value for _, value in kept]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.args = [entry for entry in node.args if not self._is_gone(entry)]
        return node

    def _is_gone(self, node: ast.AST) -> bool:
        first = node.args[0] if isinstance(node, ast.Call) and node.args else None
        if isinstance(first, ast.Constant) and str(first.value).partition(".")[0] in self._gone:
            return True
        return any(isinstance(each, ast.Name) and each.id in self._names for each in ast.walk(node))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tables", required=True)
    parser.add_argument("--packages", required=True)
    parser.add_argument("tests", nargs="+")
    given = parser.parse_args()
    sys.meta_path.insert(0, LeftOut(given.tables.split(","), given.packages.split(",")))
    sys.exit(pytest.main([*given.tests, "-p", "no:cacheprovider"]))
