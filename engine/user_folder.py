"""Folders for the user's files, with a fallback if the home folder cannot be written, for instance in a container."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)


def user_folder(path: str) -> Path:
    """Return a folder. A folder below `~` that cannot be written is replaced by one below `private_folder`, with a
    warning."""
    expanded = Path(os.path.expanduser(path))  # Path.expanduser would raise where there is no home at all
    if not path.startswith("~/") or can_write(expanded) or (private := private_folder()) is None:
        return expanded
    logger.warning("%s cannot be written, so %s is used, which may be emptied when the machine restarts", path, private)
    return private / path.removeprefix("~/")


def can_write(folder: Path) -> bool:
    """Create a folder if it is missing. Returns whether files can be created in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def private_folder() -> Path | None:
    """Return this user's folder below /tmp (or `$TMPDIR`); None if other users can write to it."""
    with suppress(OSError):
        folder = Path(tempfile.gettempdir(), f"manta-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return folder
    return None
