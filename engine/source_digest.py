"""Digests of source files, by which processes of two versions notice what they do not have in common."""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ENGINE = Path(__file__).resolve().parent
BELOW_ONE_NAME = re.compile(rb"\bmanta\.(?=(?:engine|placement|deployments|cluster)\b)")  # as in a wheel
KERNEL_PACKAGES = ("torch", "numba", "triton", "transformers")
NUMERICS = (
    "model/**/*.py", "runner/**/*.py", "lora/**/*.py", "eplb/**/*.py", "parts/*/rank/**/*.py",
    "distributed/process_group.py", "distributed/local/**/*.py", "distributed/exchange/**/*.py",
)  # fmt: skip
"""The sources of engine/ on which the bits of KV may depend."""
DIGITS = 16


@cache
def numerics_digest(engine: Path = ENGINE) -> str:
    """Return a digest of all that this version computes KV with: sources, and packages whose kernels these call. Two
    engines with the same model, options and digest compute the same KV on the same device."""
    sources = digest_of_files(engine, NUMERICS, statements)
    return digest([sources.encode(), *(package_version(name).encode() for name in KERNEL_PACKAGES)])[:DIGITS]


@cache
def engine_version() -> str:
    """Return what all ranks of an engine must have in common: the versions of Python and of packages that compute, and
    a digest of all sources of the engine."""
    packages = ", ".join(f"{name} {found}" for name in KERNEL_PACKAGES if (found := package_version(name)))
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    sources = digest_of_files(ENGINE, ["**/*.py"], as_in_a_checkout)[:DIGITS]
    return f"manta {package_version('manta-serve') or 'unknown'} with sources {sources}, {python}, {packages}"


def digest_of_files(folder: Path, patterns: Iterable[str], read: Callable[[Path], bytes] = Path.read_bytes) -> str:
    files = sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
    return digest(part for file in files for part in (str(file.relative_to(folder)).encode(), read(file)))


def digest(parts: Iterable[bytes]) -> str:
    """Return the digest of the parts. Each part is digested separately first, so that moving a border between parts
    changes the result."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def as_in_a_checkout(file: Path) -> bytes:
    """Return the source of a file without the changes of tools/wheel/build_backend.py."""
    return BELOW_ONE_NAME.sub(b"", file.read_bytes())


def statements(file: Path) -> bytes:
    """Return the syntax tree of a file of Python, in which comments, docstrings and layout have no place."""
    told: list[str] = []
    _tell(ast.parse(as_in_a_checkout(file)), told)
    return "\n".join(told).encode()


def _tell(node: object, told: list[str]) -> None:
    """Append a syntax tree. Unlike in ast.dump, fields that have nothing are left out: the next Python may have more of
    them."""
    if isinstance(node, ast.AST):
        told.append(type(node).__name__)
        for name in node._fields:
            value = getattr(node, name, None)
            if value is not None and value != []:
                told.append(f".{name}")
                _tell(value, told)
        told.append(")")
    elif isinstance(node, list):
        for item in node:
            if not _is_docstring(item):
                _tell(item, told)
        told.append("]")
    else:
        told.append(repr(node))


def _is_docstring(node: object) -> bool:
    """Return whether a statement is a text that nothing uses."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def package_version(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
