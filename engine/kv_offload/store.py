"""A folder of sealed blocks that engines share, in a file system or an object store."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import ConfigError, StartupError, without_credentials
from engine.kv_offload.disk import TEMPORARY, TEMPORARY_KEY
from engine.kv_offload.sealing import Sealer
from engine.user_folder import write_private
from engine.wire.parts.kv_offload import FoundBlock, StoreListing

logger = logging.getLogger(__name__)

UNFINISHED_S = 600.0  # age at which parts of a block without its other parts, and temporary files, are deleted
DEAD_S = 7 * 86_400.0  # without a new block, after which a temporary key counts as lost
SCOPE = re.compile(rf"({TEMPORARY_KEY}[0-9a-f]+-)?[0-9a-f]{{16}}")  # name of a folder of blocks
FILE = re.compile(rf"([0-9a-f]{{2}})/\1[0-9a-f]+(\.[0-9]+)?(\.[0-9a-f]+{re.escape(TEMPORARY)})?")  # name inside
TIMES = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")  # of a file, by file system
T = TypeVar("T")


class Unreachable(Exception):
    """Raised if a store does not answer, or answers with an error other than that a file is missing."""


class StoreFolder:
    """A folder of objects `<url>/<scope>/<2 hex digits>/<name>.<rank>`, each with one rank's part of a sealed block.

    fsspec opens the store: a path is a folder, which several machines can have mounted; `s3://bucket/path` is a bucket.
    All engines with the same scope and key read what any of them has written. There are no locks: an object never
    changes, since its name stands for its content, and an engine that misses an object computes the block.

    All methods wait for the store. Methods may be called from several threads, except `list`.
    """

    def __init__(self, url: str, scope: str, sealer: Sealer, *, rank: int = 0, ranks: int = 1):
        """scope: name of the folder for all blocks that engines with this model, setup and key can use. sealer: of this
        rank. Raises ConfigError or StartupError."""
        import fsspec  # slow to import
        from fsspec.implementations.local import LocalFileSystem

        self.url, self.rank = without_credentials(url), rank
        self._sealer, self._ranks, self._scope = sealer, ranks, scope
        try:
            self._files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError("kv_offloading_store", url, f"a URL that fsspec can open ({error})") from error
        except Exception as error:  # of a file system that connects at once
            raise StartupError(f"kv_offloading_store: {self.url} cannot be opened: {error!r}") from error
        self._root = root.rstrip("/")
        self._is_local = isinstance(self._files, LocalFileSystem)
        if self._is_local:
            try:
                Path(self._root).mkdir(mode=0o700, parents=True, exist_ok=True)
                Path(self._root, scope).mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise StartupError(f"kv_offloading_store: {url} cannot be written: {error}") from error
        self._known: dict[bytes, None] = {}  # blocks that were there at the last listing, or were written since

    def write(self, name: bytes, block: memoryview) -> None:
        """Write this rank's part of a block. Raises Unreachable."""
        self._write(self._path(name, self.rank), self._sealer.seal(name, block))
        self._known[name] = None

    def read(self, name: bytes) -> bytes:
        """Return this rank's part of a block. Raises FileNotFoundError, Unsealable if it is damaged, or Unreachable."""
        return self._sealer.open(name, _answered(lambda: self._files.cat_file(self._path(name, self.rank))))

    def delete(self, names: Iterable[bytes]) -> None:
        """Delete all ranks' parts of blocks. Raises Unreachable."""
        self._remove([self._path(name, rank) for name in names for rank in range(self._ranks)])

    def list(self) -> StoreListing:
        """Return which complete blocks were added and removed since the last call. Deletes parts of blocks that nobody
        has completed. Raises Unreachable."""
        before, now = set(self._known), time.time()
        found: dict[bytes, list[tuple[int, float, str]]] = {}  # size, age and path of each part
        unfinished: list[str] = []
        for path, info in self._find(f"{self._root}/{self._scope}").items():
            digits, _, rank = path.rpartition("/")[2].partition(".")
            with suppress(ValueError):  # not one of ours
                name = bytes.fromhex(digits)
                if rank.isdigit():
                    found.setdefault(name, []).append((info["size"], _age_s(info, now), path))
                elif path.endswith(TEMPORARY) and _age_s(info, now) > UNFINISHED_S:
                    unfinished.append(path)
        whole: list[FoundBlock] = []
        growing: set[bytes] = set()  # not all ranks have written their part yet
        for name, parts in found.items():
            age_s = min(age_s for _, age_s, _ in parts)
            if len(parts) == self._ranks:
                whole.append(FoundBlock(name, sum(size for size, _, _ in parts), age_s))
            elif age_s > UNFINISHED_S:
                unfinished += [path for _, _, path in parts]
            else:
                growing.add(name)
        self._remove(unfinished)
        names = {block.name for block in whole}
        added = sorted((block for block in whole if block.name not in before), key=lambda block: -block.age_s)
        removed = [name for name in before if name not in names and name not in growing]
        self._known.update(dict.fromkeys(names))
        for name in removed:
            self._known.pop(name, None)
        return StoreListing(added, removed)

    def delete_stale(self, ttl_s: float | None, key: str) -> None:
        """Delete what nobody will read: blocks of other models and setups that are older than `ttl_s`, and all blocks
        of temporary keys that have not been used to write for a week. Other files in the store are left alone. Raises
        Unreachable.

        key: prefix of the scopes of this engine's key, if that is a temporary one.
        """
        now = time.time()
        folders: list[dict[str, Any]] = []
        with suppress(FileNotFoundError):  # nobody has written yet
            folders = _answered(lambda: self._files.ls(self._root, detail=True))
        for folder in folders:
            path = folder["name"].rstrip("/")
            scope = path.rpartition("/")[2]
            is_of_lost_key = scope.startswith(TEMPORARY_KEY) and not (key and scope.startswith(key))
            if folder["type"] != "directory" or scope == self._scope or not SCOPE.fullmatch(scope):
                continue
            if ttl_s is None and not is_of_lost_key:
                continue
            ages = {
                file: _age_s(info, now)
                for file, info in self._find(path).items()
                if FILE.fullmatch("/".join(file.split("/")[-2:]))
            }
            if is_of_lost_key and min(ages.values(), default=0.0) > DEAD_S:
                self._remove(ages)
            elif ttl_s is not None:
                self._remove(file for file, age_s in ages.items() if age_s > ttl_s)

    def _find(self, path: str) -> dict[str, dict[str, Any]]:
        """Return all files below a folder with what is known about them; none if there is no such folder."""
        found: dict[str, dict[str, Any]] = {}
        with suppress(FileNotFoundError):
            found = _answered(lambda: self._files.find(path, detail=True))
        return found

    def _write(self, path: str, data: bytes) -> None:
        if self._is_local:
            file = Path(path)
            _answered(lambda: file.parent.mkdir(mode=0o700, exist_ok=True))
            _answered(lambda: write_private(file, data, TEMPORARY))
        else:
            _answered(lambda: self._files.pipe_file(path, data))

    def _path(self, name: bytes, rank: int) -> str:
        digits = name.hex()
        return f"{self._root}/{self._scope}/{digits[:2]}/{digits}.{rank}"

    def _remove(self, paths: Iterable[str]) -> None:
        if not (paths := list(paths)):
            return
        if self._files.async_impl:  # one request for many objects
            with suppress(FileNotFoundError):
                _answered(lambda: self._files.rm(paths))
            return
        for path in paths:
            with suppress(FileNotFoundError):
                _answered(lambda path=path: self._files.rm_file(path))  # type: ignore[misc]


def _answered(call: Callable[[], T]) -> T:
    """Call a library of a store and return the result. Raises FileNotFoundError, and Unreachable for all other
    exceptions, since those libraries share no exception class."""
    try:
        return call()
    except FileNotFoundError:
        raise
    except Exception as error:
        raise Unreachable(f"{type(error).__name__}: {error}"[:300]) from error


def _age_s(info: dict[str, Any], now: float) -> float:
    """Return the age of a file in seconds; 0 if the file system does not say when it was written."""
    written = next((info[key] for key in TIMES if info.get(key) is not None), now)
    if isinstance(written, str):
        written = datetime.fromisoformat(written)
    return max(0.0, now - (written.timestamp() if isinstance(written, datetime) else float(written)))
