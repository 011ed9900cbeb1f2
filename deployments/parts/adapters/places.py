"""Places of the sub-folders of a dynamic folder: on a disk, or in a bucket."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from engine.bucket_url import is_bucket
from engine.lora.adapter_config import CONFIG_FILE
from engine.lora.bucket import WEIGHTS_FILE, Bucket
from engine.lora.errors import AdapterError

logger = logging.getLogger(__name__)

BUCKET_S = 5.0
"""Seconds for which data that was read from a bucket counts as current."""
PATTERNS = frozenset("*?[]#")  # which bucket libraries treat as patterns, not as a name

Version = tuple[str, ...]
"""A value that changes whenever an adapter's files change."""


class AdapterPlace:
    """A place without adapters, and the methods of all places."""

    fresh_s = 0.0
    """Seconds for which a version counts as current."""

    def version(self, name: str) -> Version | None:
        """Return the version of an adapter, or None if there is no adapter of this name. Raises AdapterError."""
        return None

    def __contains__(self, name: str) -> bool:
        return self.version(name) is not None

    def read(self) -> None:
        """Update the names that `in` finds. Raises AdapterError."""

    def names(self) -> list[str]:
        """Return all names in alphabetical order. Raises AdapterError."""
        return []

    def path_of(self, name: str) -> str:
        raise KeyError(name)


def place_of(folder: str | None) -> AdapterPlace:
    """Return the place of a folder; None means no adapters. Raises AdapterError for a bucket whose library is
    missing."""
    if folder is None:
        return AdapterPlace()
    return BucketPlace(folder) if is_bucket(folder) else LocalPlace(folder)


class LocalPlace(AdapterPlace):
    """A folder on a disk. Names and links that lead out of the folder count as missing."""

    def __init__(self, folder: str):
        self._root = Path(folder).expanduser().resolve()

    def version(self, name: str) -> Version | None:
        if not _is_name(name):
            return None
        try:
            files = [(self._root / name / file).resolve(strict=True) for file in (CONFIG_FILE, WEIGHTS_FILE)]
        except OSError:  # it is not there, or its name is too long
            return None
        if not all(file.is_file() and file.is_relative_to(self._root) for file in files):
            return None
        return tuple(f"{found.st_mtime_ns} {found.st_size} {found.st_ino}" for found in map(Path.stat, files))

    def names(self) -> list[str]:
        return sorted(path.name for path in self._root.iterdir() if path.name in self) if self._root.is_dir() else []

    def path_of(self, name: str) -> str:
        return str(self._root / name)


class BucketPlace(AdapterPlace):
    """A folder of a bucket. `in` answers from the last list of names, since a look into the bucket takes long."""

    fresh_s = BUCKET_S

    def __init__(self, url: str):
        self._bucket = Bucket(url)
        self._names, self._read_at = list[str](), float("-inf")

    def version(self, name: str) -> Version | None:
        return self._bucket.version(name) if _is_name(name) and not PATTERNS & {*name} else None

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read(self) -> None:
        if time.monotonic() - self._read_at < BUCKET_S:
            return
        try:
            self._names = list(filter(_is_name, self._bucket.names()))
        except AdapterError as error:
            if self._read_at == float("-inf"):
                raise
            logger.warning("adapters listed as they were bucket=%s error=%s", self._bucket.url, error)
        self._read_at = time.monotonic()

    def names(self) -> list[str]:
        self.read()
        return self._names

    def path_of(self, name: str) -> str:
        return f"{self._bucket.url}/{name}"


def _is_name(name: str) -> bool:
    return bool(name) and not name.startswith(".") and name.isprintable() and not {"/", "\\"} & {*name}
