"""Batches, and their files while they run."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from deployments.jobs.errors import LeaseLost
from deployments.jobs.lease import Lease
from deployments.openai.batches.errors import Conflict
from deployments.openai.batches.files import DAY_S, MAX_AGE_S, Files, sync_folder
from deployments.openai.batches.objects import ENDED, HOUR_S, Batch, BatchBody, RequestCounts
from deployments.openai.batches.records import Names, Record, Records, age_s, new_id, object_key
from deployments.openai.batches.threads import in_thread
from deployments.storage.key_value import KeyValueStore, StoreUnavailable

PREFIX = "batch_"
TTL_S = 2.0 * MAX_AGE_S  # of a batch, after its last change
INPUT = "input.jsonl"  # second name of the uploaded file, which may be deleted meanwhile


class BatchRecord(Record[Batch]):
    """A batch, the name of its current attempt, and the crashes of ingresses that worked on it."""

    attempt: str = ""
    """Name of the attempt whose answers count. An ingress that was wrongly taken for dead may still write to the files
    of another attempt."""
    working: bool = False
    """Whether an ingress works on the batch, or worked on it until that ingress died."""
    line: int = -1
    """First unanswered line when an ingress last began to work."""
    crashes: int = 0
    """Number of ingresses that have died while `line` was the first unanswered line."""


class BatchStore:
    """The batches of all ingresses. Their records are in a store; the lines of each batch are in a folder until the
    batch has ended.

    Methods raise OSError and StoreUnavailable.
    """

    def __init__(self, folder: Path, values: KeyValueStore):
        self.files, self.values = Files(folder / "files", values), values
        self.records = Records(values, PREFIX, BatchRecord)
        self.unfinished = Names(values, "unfinished")
        self._work = folder / "work"

    async def create(self, body: BatchBody, owner: str | None, model: str | None) -> Batch:
        """Create a batch. Raises ObjectNotFound if its input file does not exist.

        model: model that an ingress must serve to run the batch; None lets any ingress run the batch and report its
        errors.
        """
        _, content = await self.files.content(body.input_file_id, owner)
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
        await in_thread(_link_input, content, self.work(batch.id))
        await self.add(BatchRecord(owner, batch))
        return batch

    async def add(self, record: BatchRecord) -> None:
        """Store a batch that has not ended, unless it is already stored."""
        await self.records.add(record, TTL_S)
        await self.unfinished.add(record.object.id)

    async def get(self, batch_id: str, owner: str | None) -> Batch:
        """Return a batch. Raises ObjectNotFound."""
        return await self._with_cancel((await self.records.get(batch_id, owner)).object)

    async def page(self, owner: str | None, limit: int, after: str | None) -> tuple[list[Batch], bool]:
        """Return up to `limit` batches that follow `after`, newest first, and whether there are more."""
        found, has_more = await self.records.page(owner, limit, after)
        return [await self._with_cancel(batch) for batch in found], has_more

    async def cancel(self, batch_id: str, owner: str | None) -> Batch:
        """Request the cancellation of a batch. Raises ObjectNotFound, or Conflict if the batch has ended."""
        if (await self.get(batch_id, owner)).status not in (*ENDED, "finalizing"):
            await self.values.add(_cancel_key(batch_id), str(int(time.time())).encode(), TTL_S)
        batch = await self.get(batch_id, owner)
        if batch.status in (*ENDED, "finalizing") and batch.status != "cancelled":
            raise Conflict(f"Cannot cancel a batch with status '{batch.status}'.")
        return batch

    def work(self, batch_id: str) -> Path:
        return self._work / batch_id

    async def claim(self, batch_id: str) -> BatchLease | None:
        """Return exclusive access to a batch; None if another ingress has it, or if the batch has ended."""
        claim = BatchLease(self, batch_id)
        return claim if await claim.take() else None

    async def finish(self, batch_id: str) -> None:
        """Remove the working files of an ended batch. The claim must be held."""
        await in_thread(shutil.rmtree, self.work(batch_id), ignore_errors=True)
        await self.unfinished.remove(batch_id)

    async def remove_expired(self) -> None:
        """Remove expired files, and leftovers of batches that are no longer stored."""
        await self.files.remove_expired()
        for batch_id in os.listdir(self._work) if self._work.exists() else ():
            if age_s(batch_id, PREFIX) > DAY_S and await self.records.find(batch_id) is None:
                await in_thread(shutil.rmtree, self.work(batch_id), ignore_errors=True)

    async def cancelled_at(self, batch_id: str) -> int | None:
        """Return when a client asked to cancel the batch, in seconds since 1970; None if none did."""
        value = await self.values.get(_cancel_key(batch_id))
        return None if value is None else int(value)

    async def _with_cancel(self, batch: Batch) -> Batch:
        """Return the batch; if a client has asked to cancel it, its status says so."""
        if batch.status in ("validating", "in_progress"):
            batch.cancelling_at = await self.cancelled_at(batch.id)
            batch.status = batch.status if batch.cancelling_at is None else "cancelling"
        return batch


class BatchLease:
    """Exclusive access of this ingress to a batch, by a lease, until another ingress takes it over."""

    record: BatchRecord

    def __init__(self, store: BatchStore, batch_id: str):
        self._lease = Lease(store.values, batch_id, self._restore)
        self._store, self._batch_id, self._stored = store, batch_id, b""

    async def take(self) -> bool:
        """Claim the batch. Returns False if another ingress has it, or if it has ended or is no longer stored."""
        if not await self._lease.take(await self._store.values.settled()):
            return False
        record = await self._store.records.find(self._batch_id)
        if record is not None and record.object.status not in ENDED:
            self.record, self._stored = record, record.encode()
            return True
        await self._store.finish(self._batch_id)
        await self._lease.release()
        return False

    async def save(self) -> None:
        """Store the record. Raises LeaseLost, without storing, if another ingress has changed it."""
        values, key, value = self._store.values, object_key(self._batch_id), self.record.encode()
        saved = await self._lease.renew() and (
            await values.replace(key, self._stored, value, TTL_S)
            or await values.get(key) == value  # an earlier attempt stored it, but its confirmation was lost
        )
        if not saved:
            raise LeaseLost
        self._stored = value

    @asynccontextmanager
    async def held(self) -> AsyncGenerator[None]:
        """Keep the lease inside the block, then release it. Cancels the current task once another holder has the
        lease."""
        try:
            async with self._lease.kept():
                yield
        finally:
            with suppress(StoreUnavailable):
                if await self._lease.holds():
                    await self._lease.release()

    async def _restore(self) -> bool:
        await self._store.values.add(object_key(self._batch_id), self._stored, TTL_S)
        await self._store.add(self.record)  # restores its entries in lists too
        return True  # `save` notices whether another ingress has ended it


def _link_input(content: Path, work: Path) -> None:
    work.mkdir(mode=0o700, parents=True)
    os.link(content, work / INPUT)
    sync_folder(work)
    sync_folder(work.parent)


def _cancel_key(batch_id: str) -> str:
    return f"manta:cancel:{batch_id}"
