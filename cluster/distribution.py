"""Facts about the installed Manta: its version, its commit, and the files that come with it."""

from __future__ import annotations

import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

from engine.errors import InvalidParameter

DISTRIBUTION = "manta-serve"
ROOT = Path(__file__).resolve().parents[1]  # a checkout, or the installed package `manta`, which has the same files
EXAMPLES = ("serve_config.yaml", "serve_config_pd.yaml", "docs", "k8s")


def version_and_commit() -> str:
    """Return a line like `0.1.0 (commit 0123456789ab)`, without the commit if neither the build nor git knows it."""
    found = commit()
    return version(DISTRIBUTION) + (f" (commit {found})" if found else "")


def commit() -> str | None:
    """Return the commit of this code, followed by `-dirty` if files differ from it."""
    if (built := ROOT / "COMMIT").exists():  # by tools/wheel/build_backend.py
        return built.read_text()
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def copy_examples(folder: Path) -> list[Path]:
    """Copy the files named in the commands' help: configurations, Kubernetes manifests, and documentation. Returns the
    copies.

    Raises InvalidParameter, and copies nothing, if one of them already exists.
    """
    copies = {ROOT / name: folder / name for name in EXAMPLES}
    for copy in copies.values():
        if copy.exists():
            raise InvalidParameter("FOLDER", str(folder), f"one without a {copy.name}")
    folder.mkdir(parents=True, exist_ok=True)
    for source, copy in copies.items():
        if source.is_dir():
            shutil.copytree(source, copy)
        else:
            shutil.copy(source, copy)
    return list(copies.values())
