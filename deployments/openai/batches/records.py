"""Objects of the API, one JSON file each."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from deployments.openai.batches.errors import ObjectNotFound

DIGITS = 16  # of an id: when it was made; as many random ones follow


class HasId(Protocol):
    id: str


T = TypeVar("T", bound=HasId)


class Record(msgspec.Struct, Generic[T]):
    """An object, and whose it is."""

    owner: str | None
    """Name of the API key; None on a server without keys."""
    object: T


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess. Ids sort by the time when they were made."""
    return f"{prefix}{time.time_ns():0{DIGITS}x}{secrets.token_hex(DIGITS // 2)}"


def age_s(object_id: str, prefix: str) -> float:
    return time.time() - int(object_id.removeprefix(prefix)[:DIGITS], 16) / 1e9


class Records(Generic[T]):
    """All objects of one kind.

    Any number of processes may share the folder. A write replaces an object as a whole, so that a reader sees the old
    one or the new one. All methods are for threads; they raise OSError.
    """

    def __init__(self, folder: Path, prefix: str, kind: Any):
        """kind: Record[T]."""
        self.folder = folder
        self._prefix, self._decoder = prefix, msgspec.json.Decoder(kind)
        self._id = re.compile(rf"{prefix}[0-9a-f]{{{2 * DIGITS}}}")

    def put(self, owner: str | None, value: T) -> None:
        """Write an object, as the only one who does. It outlives a power cut."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self.folder / f"{value.id}.tmp"
        try:
            with temporary.open("wb") as file:
                file.write(msgspec.json.encode(Record(owner, value)))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path(value.id))
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(self.folder)

    def find(self, object_id: str) -> Record[T] | None:
        if self._id.fullmatch(object_id) is None:
            return None
        try:
            record: Record[T] = self._decoder.decode(self._path(object_id).read_bytes())
        except FileNotFoundError:
            return None
        return record

    def get(self, object_id: str, owner: str | None) -> T:
        """Return an object of this owner. Raises ObjectNotFound."""
        record = self.find(object_id)
        if record is None or record.owner != owner:
            raise ObjectNotFound(object_id)
        return record.object

    def remove(self, object_id: str) -> None:
        self._path(object_id).unlink(missing_ok=True)

    def all(self, *, newest_first: bool = False, after: str | None = None) -> Iterator[Record[T]]:
        """Return the objects in the order of their ids, of which those up to `after` are left out."""
        names = os.listdir(self.folder) if self.folder.exists() else []
        ids = (name.removesuffix(".json") for name in names if name.endswith(".json"))
        for object_id in sorted(filter(self._id.fullmatch, ids), reverse=newest_first):
            beyond = after is None or (object_id < after if newest_first else object_id > after)
            if beyond and (record := self.find(object_id)) is not None:
                yield record

    def page(
        self,
        owner: str | None,
        limit: int,
        after: str | None,
        *,
        newest_first: bool = True,
        wanted: Callable[[T], bool] = lambda _: True,
    ) -> tuple[list[T], bool]:
        """Return up to `limit` objects of this owner that follow `after`, and whether there are more."""
        found: list[T] = []
        for record in self.all(newest_first=newest_first, after=after):
            if record.owner == owner and wanted(record.object):
                if len(found) == limit:
                    return found, True
                found.append(record.object)
        return found, False

    def _path(self, object_id: str) -> Path:
        return self.folder / f"{object_id}.json"


def sync_folder(folder: Path) -> None:
    """Make sure that new names in a folder outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
