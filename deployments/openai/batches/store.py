"""Batches, and what is kept of them while they are worked on."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deployments.openai.batches.errors import Conflict
from deployments.openai.batches.files import DAY_S, MAX_AGE_S, Files
from deployments.openai.batches.objects import ENDED, HOUR_S, Batch, BatchBody, RequestCounts
from deployments.openai.batches.records import Record, Records, age_s, new_id, sync_folder

PREFIX = "batch_"
# files of a batch's work folder, which is there until it has ended
INPUT = "input.jsonl"  # the upload, under a name of its own: it may be deleted meanwhile
OUTPUT, ERRORS = "output.jsonl", "errors.jsonl"
CANCEL = "cancel"  # exists if the batch is to be cancelled
LOCK = "lock"
ATTEMPT = "attempt"  # what is tried now, and how often that has ended the process


class BatchStore:
    """A folder of files and batches that any number of processes may share.

    Only who holds the claim on a batch writes it; the kernel releases the claim of a process that dies. All methods are
    for threads; they raise OSError.
    """

    def __init__(self, folder: Path):
        self.files = Files(folder / "files")
        self._records: Records[Batch] = Records(folder / "batches", PREFIX, Record[Batch])
        self._work = folder / "work"

    def create(self, body: BatchBody, owner: str | None, model: str | None) -> Batch:
        """Raises ObjectNotFound if there is no such input file.

        model: for which the batch waits, if some server is known to have it; None lets any server say what is wrong.
        """
        _, content = self.files.content(body.input_file_id, owner)
        now = int(time.time())
        batch = Batch(
            id=new_id(PREFIX),
            endpoint=body.endpoint,
            model=model,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + int(body.completion_window.removesuffix("h")) * HOUR_S,
            output_expires_after=body.output_expires_after.model_dump(),
            request_counts=RequestCounts(),
            metadata=body.metadata,
        )
        work = self.work(batch.id)
        work.mkdir(mode=0o700, parents=True)
        try:
            os.link(content, work / INPUT)
            sync_folder(work)
            sync_folder(self._work)
            self._records.put(owner, batch)
        except OSError:
            shutil.rmtree(work)
            raise
        return batch

    def get(self, batch_id: str, owner: str | None) -> Batch:
        """Raises ObjectNotFound."""
        return self._with_cancel(self._records.get(batch_id, owner))

    def page(self, owner: str | None, limit: int, after: str | None) -> tuple[list[Batch], bool]:
        """Return up to `limit` batches that follow `after`, the newest first, and whether there are more."""
        found, has_more = self._records.page(owner, limit, after)
        return [self._with_cancel(batch) for batch in found], has_more

    def cancel(self, batch_id: str, owner: str | None) -> Batch:
        """Raises ObjectNotFound, or Conflict for a batch that has ended."""
        with suppress(FileNotFoundError):  # it has ended just now
            if self.get(batch_id, owner).status not in (*ENDED, "finalizing"):
                (self.work(batch_id) / CANCEL).touch()
        batch = self.get(batch_id, owner)
        if batch.status in (*ENDED, "finalizing") and batch.status != "cancelled":
            raise Conflict(f"Cannot cancel a batch with status '{batch.status}'.")
        return batch

    def save(self, record: Record[Batch]) -> None:
        self._records.put(record.owner, record.object)

    def work(self, batch_id: str) -> Path:
        return self._work / batch_id

    def unfinished(self) -> list[str]:
        """Return the ids of batches that have not ended, the oldest first."""
        return sorted(os.listdir(self._work)) if self._work.exists() else []

    def owner(self, batch_id: str) -> str | None:
        record = self._records.find(batch_id)
        return None if record is None else record.owner

    @contextmanager
    def claim(self, batch_id: str) -> Iterator[Record[Batch] | None]:
        """Yield a batch for the time that nobody else works on it; None if somebody does, or if it has ended."""
        work = self.work(batch_id)
        try:
            lock = (work / LOCK).open("ab")
        except FileNotFoundError:
            yield None
            return
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            record = self._records.find(batch_id)  # None: it is just being created
            if record is not None and record.object.status in ENDED:
                shutil.rmtree(work, ignore_errors=True)
                record = None
            yield record

    def begin_attempt(self, batch_id: str, line: int) -> int:
        """Note that a batch is worked on from a line on, until `end_attempt`, and return how many processes have ended
        in between while it was at this line. The claim is held."""
        path = self.work(batch_id) / ATTEMPT
        try:
            begun_at, ended = map(int, path.read_text().split())
        except (FileNotFoundError, ValueError):  # ValueError: a power cut
            begun_at = ended = -1
        ended = ended if begun_at == line else 0
        path.write_text(f"{line} {ended + 1}")  # it outlives the process, and need not outlive a power cut
        return ended

    def end_attempt(self, batch_id: str) -> None:
        (self.work(batch_id) / ATTEMPT).unlink(missing_ok=True)

    def remove_expired(self) -> None:
        """Remove files that have expired, batches that ended long ago, and what was left while one was created."""
        self.files.remove_expired()
        for record in self._records.all():
            batch = record.object
            if batch.status in ENDED and age_s(batch.id, PREFIX) > 2 * MAX_AGE_S:
                self._records.remove(batch.id)
        for batch_id in self.unfinished():
            if age_s(batch_id, PREFIX) > DAY_S and self._records.find(batch_id) is None:
                shutil.rmtree(self.work(batch_id), ignore_errors=True)

    def cancelled_at(self, batch_id: str) -> int | None:
        """Return when somebody asked to cancel the batch."""
        try:
            return int((self.work(batch_id) / CANCEL).stat().st_mtime)
        except FileNotFoundError:
            return None

    def _with_cancel(self, batch: Batch) -> Batch:
        """Return the batch as it is with a wish to cancel it that nobody has seen yet."""
        if batch.status in ("validating", "in_progress"):
            batch.cancelling_at = self.cancelled_at(batch.id)
            batch.status = batch.status if batch.cancelling_at is None else "cancelling"
        return batch
