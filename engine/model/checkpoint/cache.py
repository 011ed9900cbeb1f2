"""Caches folders that are made from a model's files, for all processes of a machine."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.user_folder import user_folder

CACHE = Path("~/.cache/manta/models")


def made_folder(state: Any, fill: Callable[[Path], None]) -> Path:
    """Return the cached folder for a JSON value, the same in every process. `fill` writes the files of a new one.

    Making one removes those that link to files which are gone.
    """
    target = user_folder(str(CACHE)) / hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    for other in target.parent.iterdir():
        with suppress(OSError):  # another process removes it too
            if any(link.is_symlink() and not link.exists() for link in other.iterdir()):
                shutil.rmtree(other)
    made = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        fill(made)
        os.rename(made, target)
    except BaseException:
        shutil.rmtree(made)
        if not target.exists():  # another process was faster
            raise
    return target
