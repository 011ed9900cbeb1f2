"""Files uploaded by clients, and files written by batches."""

from __future__ import annotations

import errno
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from deployments.openai.batches.records import Record, Records, age_s, new_id
from deployments.openai.batches.threads import in_thread
from deployments.storage.key_value import KeyValueStore
from engine.user_folder import given_folder, new_private_file

PREFIX = "file-"
DAY_S = 24 * 3600
MAX_AGE_S = 30 * DAY_S
LEFT_S = 3600  # after which content without a File is removed
MIN_FREE_BYTES = 2**30  # of disk space that uploads and batches leave free
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
    """The contents of files in a folder, as `ID.data`, and their File objects in a store. A File object is written
    after its content and removed before it.

    Methods raise OSError and StoreUnavailable.
    """

    def __init__(self, folder: Path, values: KeyValueStore):
        self._records = Records(values, PREFIX, Record[File])
        self._folder = folder

    async def upload(self, content: BinaryIO, owner: str | None, filename: str, expires_after_s: int) -> File:
        path = self._path(file_id := new_id(PREFIX))
        try:
            await in_thread(self._copy, content, path)
            return await self._add(file_id, owner, filename, "batch", expires_after_s)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    async def adopt(self, content: Path, file_id: str, owner: str | None, filename: str, expires_after_s: int) -> None:
        """Turn content that a batch has written and synced into a file. If interrupted, it can be repeated."""
        with suppress(FileExistsError):
            os.link(content, self._path(file_id))
        await self._add(file_id, owner, filename, "batch_output", expires_after_s)

    async def get(self, file_id: str, owner: str | None) -> File:
        """Return a file. Raises ObjectNotFound if it does not exist or has expired."""
        return (await self._records.get(file_id, owner)).object

    async def page(
        self, owner: str | None, limit: int, after: str | None, purpose: str | None = None, *, newest_first: bool = True
    ) -> tuple[list[File], bool]:
        """Return up to `limit` files that follow `after`, and whether there are more."""
        wanted = (lambda _: True) if purpose is None else (lambda file: file.purpose == purpose)
        return await self._records.page(owner, limit, after, newest_first=newest_first, wanted=wanted)

    async def content(self, file_id: str, owner: str | None) -> tuple[File, Path]:
        """Return a file and the path of its content. Raises ObjectNotFound."""
        file, path = await self.get(file_id, owner), self._path(file_id)
        await in_thread(path.stat)  # raises if ingresses do not share the folder, and it is in another one
        return file, path

    async def delete(self, file_id: str, owner: str | None) -> None:
        """Delete a file. Raises ObjectNotFound."""
        await self._records.remove(await self._records.get(file_id, owner))
        self._path(file_id).unlink(missing_ok=True)

    async def remove_expired(self) -> None:
        """Remove the contents of expired files, and leftovers of interrupted uploads and deletions."""
        for path in await in_thread(list, self._folder.glob(f"{PREFIX}*.data")):
            if age_s(path.stem, PREFIX) > LEFT_S and await self._records.find(path.stem) is None:
                path.unlink(missing_ok=True)

    def _copy(self, content: BinaryIO, path: Path) -> None:
        size = content.seek(0, os.SEEK_END)
        content.seek(0)
        given_folder(self._folder)
        check_space(self._folder, size)
        with open(path, "xb", opener=new_private_file) as file:
            shutil.copyfileobj(content, file, COPY_BYTES)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._folder)

    async def _add(
        self, file_id: str, owner: str | None, filename: str, purpose: Purpose, expires_after_s: int
    ) -> File:
        now = int(time.time())
        file = File(
            id=file_id,
            bytes=self._path(file_id).stat().st_size,
            created_at=now,
            expires_at=now + expires_after_s,
            filename=filename,
            purpose=purpose,
        )
        await self._records.add(Record(owner, file), expires_after_s)
        return file

    def _path(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.data"


def check_space(folder: Path, size: int = 0) -> None:
    """Raise OSError if the disk has no space for this many bytes and MIN_FREE_BYTES."""
    if shutil.disk_usage(folder).free < size + MIN_FREE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def sync_folder(folder: Path) -> None:
    """Make new names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
