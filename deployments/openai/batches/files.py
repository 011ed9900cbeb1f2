"""Files that clients have uploaded, and those that batches have written."""

from __future__ import annotations

import errno
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from deployments.openai.batches.errors import ObjectNotFound
from deployments.openai.batches.records import Record, Records, age_s, new_id

PREFIX = "file-"
DAY_S = 24 * 3600
MAX_AGE_S = 30 * DAY_S
MIN_FREE_BYTES = 2**30  # that uploads and batches leave on the disk
COPY_BYTES = 2**20
Purpose = Literal["batch", "batch_output"]


class File(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: str = "processed"


class Files:
    """A folder of files: `ID.data` is the content, and `ID.json` the File, which is written last and removed first.

    All methods are for threads; they raise OSError.
    """

    def __init__(self, folder: Path):
        self._records: Records[File] = Records(folder, PREFIX, Record[File])
        self._folder = folder

    def upload(self, content: BinaryIO, owner: str | None, filename: str, expires_after_s: int) -> File:
        """Store an upload."""
        file_id = new_id(PREFIX)
        size = content.seek(0, os.SEEK_END)
        content.seek(0)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_space(self._folder, size)
        path = self._path(file_id)
        try:
            with path.open("xb") as file:
                shutil.copyfileobj(content, file, COPY_BYTES)
                file.flush()
                os.fsync(file.fileno())
            return self._put(file_id, owner, filename, "batch", expires_after_s)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def adopt(self, content: Path, file_id: str, owner: str | None, filename: str, expires_after_s: int) -> None:
        """Make a file of what a batch has written and synced. It may be done again if it did not come to its end."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.link(content, self._path(file_id))
        self._put(file_id, owner, filename, "batch_output", expires_after_s)

    def get(self, file_id: str, owner: str | None) -> File:
        """Raises ObjectNotFound, also for a file that has expired."""
        file = self._records.get(file_id, owner)
        if file.expires_at <= time.time():
            raise ObjectNotFound(file_id)
        return file

    def page(
        self, owner: str | None, limit: int, after: str | None, purpose: str | None = None, *, newest_first: bool = True
    ) -> tuple[list[File], bool]:
        """Return up to `limit` files that follow `after`, and whether there are more."""
        now = time.time()
        return self._records.page(
            owner,
            limit,
            after,
            newest_first=newest_first,
            wanted=lambda file: file.expires_at > now and purpose in (None, file.purpose),
        )

    def content(self, file_id: str, owner: str | None) -> tuple[File, Path]:
        """Return a file and where its content is. Raises ObjectNotFound."""
        return self.get(file_id, owner), self._path(file_id)

    def delete(self, file_id: str, owner: str | None) -> None:
        """Raises ObjectNotFound."""
        self.get(file_id, owner)
        self._remove(file_id)

    def remove_expired(self) -> None:
        """Remove files that have expired, and what uploads and deletions have left that did not come to their end."""
        for record in self._records.all():
            if record.object.expires_at <= time.time():
                self._remove(record.object.id)
        for path in self._folder.glob(f"{PREFIX}*.data"):
            if age_s(path.stem, PREFIX) > DAY_S and self._records.find(path.stem) is None:
                path.unlink(missing_ok=True)

    def _put(self, file_id: str, owner: str | None, filename: str, purpose: Purpose, expires_after_s: int) -> File:
        now = int(time.time())
        file = File(
            id=file_id,
            bytes=self._path(file_id).stat().st_size,
            created_at=now,
            expires_at=now + expires_after_s,
            filename=filename,
            purpose=purpose,
        )
        self._records.put(owner, file)
        return file

    def _remove(self, file_id: str) -> None:
        self._records.remove(file_id)
        self._path(file_id).unlink(missing_ok=True)

    def _path(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.data"


def check_space(folder: Path, size: int = 0) -> None:
    """Raise OSError if the disk has no room for so many bytes, and some for others."""
    if shutil.disk_usage(folder).free < size + MIN_FREE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
