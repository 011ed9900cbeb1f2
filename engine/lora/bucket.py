"""Adapters in a bucket of S3, Google Cloud Storage or Azure, read through fsspec."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from engine.lora.adapter_config import CONFIG_FILE
from engine.lora.errors import AdapterError, AdapterNotFound
from engine.user_folder import user_folder

WEIGHTS_FILE = "adapter_model.safetensors"
COPIES = "~/.cache/manta/adapters"
MAX_BYTES = 20 << 30
"""Size of all local copies together, beyond which those that were used least recently are deleted."""
TRIES = 3  # of a copy, if the files change meanwhile
T = TypeVar("T")


class Bucket:
    """A folder of a bucket, with an adapter in each sub-folder. Its methods wait for the network."""

    def __init__(self, url: str):
        """Raises AdapterError if the package for this kind of bucket is missing."""
        import fsspec  # slow to import, and not needed for local folders

        self.url = url.rstrip("/")
        self._files, self._root = _answered(url, lambda: fsspec.core.url_to_fs(self.url, use_listings_cache=False))

    def names(self) -> list[str]:
        """Return the names of the sub-folders. Raises AdapterError."""
        entries = _answered(self.url, lambda: self._files.ls(self._root, detail=True))
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory")

    def version(self, name: str) -> tuple[str, ...] | None:
        """Return a value that changes whenever an adapter's files change, or None if there is no adapter of this name.
        name: "" if this folder itself is the adapter. Raises AdapterError."""
        with suppress(AdapterNotFound):
            return tuple(
                str(_answered(self.url, partial(self._files.checksum, self._path(name, file))))
                for file in (CONFIG_FILE, WEIGHTS_FILE)
            )
        return None

    def copy(self, name: str, folder: Path) -> None:
        """Copy the files of an adapter into a folder. Raises AdapterError."""
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            _answered(self.url, partial(self._files.get_file, self._path(name, file), str(folder / file)))

    def _path(self, *parts: str) -> str:
        return "/".join([self._root.rstrip("/"), *filter(None, parts)])


def local_copy(url: str, adapter: str) -> Path:
    """Return a local folder with the current files of an adapter in a bucket. Files are copied only if they have
    changed. adapter: name for errors. Raises AdapterError."""
    bucket, copies = Bucket(url), user_folder(COPIES)
    copies.mkdir(parents=True, exist_ok=True)
    for _ in range(TRIES):
        if (version := bucket.version("")) is None:
            raise AdapterNotFound(adapter, "path", url, f"a folder of a bucket with {CONFIG_FILE} and {WEIGHTS_FILE}")
        copy = copies / hashlib.sha256(repr((url, version)).encode()).hexdigest()[:32]
        if not copy.is_dir():
            with tempfile.TemporaryDirectory(dir=copies, prefix=".") as made:
                Path(made, "files").mkdir()
                bucket.copy("", Path(made, "files"))
                if bucket.version("") != version:
                    continue
                with suppress(OSError):  # another process was faster
                    os.rename(Path(made, "files"), copy)
        os.utime(copy)
        _delete_old(copies, keep=copy)
        return copy
    raise AdapterError(adapter, "path", url, "a folder whose files do not change while they are read")


def _delete_old(copies: Path, keep: Path) -> None:
    found = []
    for path in copies.glob("[!.]*"):
        with suppress(FileNotFoundError):  # another process has just deleted it
            found.append((path.stat().st_mtime, path, sum(file.stat().st_size for file in path.iterdir())))
    total = sum(size for _, _, size in found)
    for _, path, size in sorted(found):
        if total <= MAX_BYTES or path == keep:
            return
        shutil.rmtree(path, ignore_errors=True)
        total -= size


def _answered(url: str, call: Callable[[], T]) -> T:
    """Call a bucket's library and return the result. Raises AdapterNotFound for a missing file, and AdapterError for
    all other exceptions, since those libraries share no exception class."""
    try:
        return call()
    except FileNotFoundError:
        raise AdapterNotFound(url, "path", url, "in the bucket") from None
    except Exception as error:
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"[:300]
        raise AdapterError(url, "path", url, f"a bucket that can be read ({reason})") from error
