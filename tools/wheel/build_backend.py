"""The build backend: setuptools, over a tree in which our packages lie below one name.

A checkout has `engine`, `placement`, `deployments` and `cluster` side by side, which an environment shared with others
cannot: those names are everybody's. In the wheel they are `manta.engine` and so on. Their files are copied to `manta/`,
and in each line that imports one of them its name is prefixed; nothing else changes, so lines keep their numbers. What
the commands name (configurations, manifests, docs) is copied there too, where the root of a checkout has it. The Helm
chart's links to folders become copies of them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # a checkout is installed as it is
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
]

PACKAGES = ("engine", "placement", "deployments", "cluster")
NAMES = "|".join(PACKAGES)
IMPORT = re.compile(rf"^(\s*from )(?=(?:{NAMES})(?:\.[\w.]+)? import\b)", re.MULTILINE)
BARE_IMPORT = re.compile(rf"^\s*import (?:{NAMES})\b", re.MULTILINE)  # binds a name that would be another
COMMAND = re.compile(rf"(python -m )(?=(?:{NAMES})\b)")
SETTING = re.compile(rf'(")(?=(?:{NAMES})[.*:])')  # in pyproject.toml: entry points and packages
MADE = re.compile(r"^\.|^__pycache__$|^build$|\.egg-info$")
COMMIT = "COMMIT"
SHIPPED = (COMMIT, "serve_config*.yaml", "docs/*.md", "docs/measurements/*.md", "k8s")


def build_wheel(
    wheel_directory: str, config_settings: Mapping[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    with _staged_in_place() as tree:
        for package in PACKAGES:
            shutil.move(tree / package, tree / "manta" / package)
        for file in (tree / "manta").rglob("*.py"):
            _edit(file, below_one_name)
        _edit(tree / "pyproject.toml", lambda text: SETTING.sub(r"\1manta.", text))
        for pattern in SHIPPED:
            for path in tree.glob(pattern):
                target = tree / "manta" / path.relative_to(tree)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, target)
        (tree / "MANIFEST.in").write_text("graft manta\n")
        return build_meta.build_wheel(wheel_directory, config_settings)


def build_sdist(sdist_directory: str, config_settings: Mapping[str, Any] | None = None) -> str:
    with _staged_in_place() as tree:
        (tree / "MANIFEST.in").write_text("graft .\n")
        return build_meta.build_sdist(sdist_directory, config_settings)


def below_one_name(source: str) -> str:
    """Prefix our packages where a file imports them. Raises ValueError for an import that cannot be prefixed."""
    if found := BARE_IMPORT.search(source):
        raise ValueError(f"{found[0].strip()!r}: the wheel has it below `manta`; write `from ... import ...`")
    return COMMAND.sub(r"\1manta.", IMPORT.sub(r"\1manta.", source))


@contextmanager
def _staged_in_place() -> Iterator[Path]:
    """Have the current folder be a copy of the source tree, with the commit in COMMIT."""
    root = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in _sources(root):
            target = tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (root / name).is_dir() else shutil.copy2  # a link to a folder
            copy(root / name, target)
        if commit := _git(root, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"):
            (tree / COMMIT).write_text(commit)
            # the same bytes for the same commit
            os.environ.setdefault("SOURCE_DATE_EPOCH", _git(root, "log", "-1", "--format=%ct"))
        os.chdir(tree)
        try:
            yield tree
        finally:
            os.chdir(root)


def _sources(root: Path) -> list[str]:
    """Return the files of a checkout that git knows or would; or those of an unpacked sdist, without what is made."""
    if listed := _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z"):
        return [name for name in listed.split("\0") if name and (root / name).exists()]
    files = [file.relative_to(root) for file in root.rglob("*") if file.is_file()]
    return [str(file) for file in files if not any(MADE.search(folder) for folder in file.parent.parts)]


def _git(root: Path, *arguments: str) -> str:
    """Return what git answers; nothing where `root` is not the top of a checkout, or there is no git."""
    if not (root / ".git").exists() or shutil.which("git") is None:
        return ""
    command = ["git", "-c", f"safe.directory={root}", *arguments]  # root may build what another user has cloned
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip("\n")


def _edit(file: Path, change: Any) -> None:
    file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")
