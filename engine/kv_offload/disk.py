"""A folder of block files, owned by one rank of one engine."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from engine.errors import StartupError
from engine.kv_offload.sealing import OVERHEAD, Sealer
from engine.user_folder import given_folder, is_own_folder, own_folder, write_private
from engine.wire.parts.kv_offload import FoundBlock

logger = logging.getLogger(__name__)

PAGE = 4096  # bytes in which file systems give out space
MAX_ENGINES = 1024  # of one scope that use a folder at a time
TEMPORARY = ".tmp"
TEMPORARY_KEY = "temporary-"  # begins the name of a scope whose key is stored nowhere; the key's name follows


class DiskFolder:
    """A folder of files `<root>/<scope>/<number>/<2 hex digits>/<name>`, each with one sealed block. A file holds all
    layers of its block, so one read fetches the block.

    Only the owner can read files and folders. The engines of one machine share `root`. Each locks the first free
    folder, so a restarted engine finds the blocks that its predecessor wrote. A file is written under a temporary name,
    then renamed. There is no fsync: a block damaged by a power loss fails to decrypt, and counts as missing.

    Methods may be called from several threads, for different names.
    """

    def __init__(self, root: Path, scope: str, sealer: Sealer):
        """scope: name of a folder for all blocks that this engine can use. Raises StartupError."""
        self._sealer = sealer
        try:
            given_folder(root)
            self.path, self._lock = _lock_folder(root / scope)
        except OSError as error:
            raise StartupError(f"kv_offloading_dir: {root} cannot be written: {error}") from error

    def find(self) -> list[FoundBlock]:
        """Return all blocks, oldest first. Deletes temporary files that were never renamed."""
        found, now = [], time.time()
        for file in self.path.glob("??/*"):
            if file.suffix == TEMPORARY:
                file.unlink(missing_ok=True)
                continue
            with suppress(ValueError, OSError):  # not one of ours, or just gone
                status = file.stat()
                found.append(FoundBlock(bytes.fromhex(file.name), on_disk(status.st_size), now - status.st_mtime))
        return sorted(found, key=lambda block: -block.age_s)

    def write(self, name: bytes, block: memoryview) -> None:
        """Write a block. If this fails, raises OSError and leaves no file behind."""
        file = self._file(name)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        write_private(file, self._sealer.seal(name, block), TEMPORARY)

    def read(self, name: bytes) -> bytes:
        """Return a block. Raises OSError if there is none, and Unsealable if it is damaged."""
        return self._sealer.open(name, self._file(name).read_bytes())

    def delete(self, name: bytes) -> None:
        with suppress(OSError):
            self._file(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Unlock the folder, so that another engine can use it."""
        os.close(self._lock)

    def _file(self, name: bytes) -> Path:
        digits = name.hex()
        return self.path / digits[:2] / digits


def on_disk(size: int) -> int:
    """Return the bytes of disk space that a file of `size` bytes takes."""
    return -(-size // PAGE) * PAGE


def sealed_size(block_bytes: int) -> int:
    """Return the bytes of disk space that a block takes once it is sealed."""
    return on_disk(block_bytes + OVERHEAD)


def delete_stale(root: Path, own: Path, ttl_s: float | None, key: str = "") -> None:
    """In folders that no engine has locked, delete the blocks that nobody will read. These are blocks older than
    `ttl_s`, and all blocks whose key was temporary and is lost with its cluster or engine.

    own: folder of this engine. key: prefix of the scopes of this engine's key, if that is a temporary one. Other
    engines and ranks with this key may be restarting, so of their blocks only those older than `ttl_s` are deleted.
    """
    folders: list[Path] = []
    with suppress(OSError):  # here and below: others may be deleting too
        folders.extend(lock.parent for lock in root.glob("*/*/lock") if lock.parent != own)
    for folder in folders:
        scope = folder.parent.name
        is_stale = scope.startswith(TEMPORARY_KEY) and not (key and scope.startswith(key))
        with suppress(OSError):
            if (is_stale or ttl_s is not None) and is_own_folder(folder.parent) and is_own_folder(folder):
                _delete(folder, None if is_stale else ttl_s)


def _delete(folder: Path, ttl_s: float | None) -> None:
    """Delete a folder, or its blocks that are older than `ttl_s`, unless another process has locked it."""
    descriptor = _lock(folder)
    if descriptor is None:
        return
    try:
        if ttl_s is None:
            shutil.rmtree(folder)
            folder.parent.rmdir()  # the last one's
            return
        for file in folder.glob("??/*"):
            if time.time() - file.stat().st_mtime > ttl_s:
                file.unlink()
    finally:
        os.close(descriptor)


def _lock_folder(scope: Path) -> tuple[Path, int]:
    """Create and lock the first folder of a scope that no other process has locked."""
    for number in range(MAX_ENGINES):
        folder = own_folder(scope) / str(number)
        descriptor = _lock(folder)
        if descriptor is not None:
            return folder, descriptor
    raise OSError(f"{MAX_ENGINES} engines use it")


def _lock(folder: Path) -> int | None:
    """Lock a folder until the descriptor is closed or the process ends. Returns None if another process has locked
    it, or has just deleted it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = os.fstat(descriptor).st_nlink > 0
    except BlockingIOError:
        is_locked = False
    if is_locked:
        return descriptor
    os.close(descriptor)
    return None
