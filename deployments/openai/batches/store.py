"""Batches, and what is kept of them while they are worked on."""

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
INPUT = "input.jsonl"  # the upload, under a second name: it may be deleted meanwhile


class BatchRecord(Record[Batch]):
    """A batch, where its answers are, and whether it ends the ingresses that work on it."""

    attempt: str = ""
    """Name of the attempt whose answers count: an ingress that was taken for dead may still write others."""
    working: bool = False
    """An ingress works on it, or did until it died."""
    line: int = -1
    """Where the batch was when the work began."""
    crashes: int = 0
    """Ingresses that have died while it was there."""


class BatchStore:
    """Batches of all ingresses: what they are in a store, and the lines of each in a folder, until it has ended.

    Methods raise OSError and StoreUnavailable.
    """

    def __init__(self, folder: Path, values: KeyValueStore):
        self.files, self.values = Files(folder / "files", values), values
        self.records = Records(values, PREFIX, BatchRecord)
        self.unfinished = Names(values, "unfinished")
        self._work = folder / "work"

    async def create(self, body: BatchBody, owner: str | None, model: str | None) -> Batch:
        """Raises ObjectNotFound if there is no such input file.

        model: for which the batch waits, if some server is known to have it; None lets any server say what is wrong.
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
        """Store a batch that has not ended, unless it is stored."""
        await self.records.add(record, TTL_S)
        await self.unfinished.add(record.object.id)

    async def get(self, batch_id: str, owner: str | None) -> Batch:
        """Raises ObjectNotFound."""
        return await self._with_cancel((await self.records.get(batch_id, owner)).object)

    async def page(self, owner: str | None, limit: int, after: str | None) -> tuple[list[Batch], bool]:
        """Return up to `limit` batches that follow `after`, the newest first, and whether there are more."""
        found, has_more = await self.records.page(owner, limit, after)
        return [await self._with_cancel(batch) for batch in found], has_more

    async def cancel(self, batch_id: str, owner: str | None) -> Batch:
        """Raises ObjectNotFound, or Conflict for a batch that has ended."""
        if (await self.get(batch_id, owner)).status not in (*ENDED, "finalizing"):
            await self.values.add(_cancel_key(batch_id), str(int(time.time())).encode(), TTL_S)
        batch = await self.get(batch_id, owner)
        if batch.status in (*ENDED, "finalizing") and batch.status != "cancelled":
            raise Conflict(f"Cannot cancel a batch with status '{batch.status}'.")
        return batch

    def work(self, batch_id: str) -> Path:
        return self._work / batch_id

    async def claim(self, batch_id: str) -> Claim | None:
        """Return a batch that no other ingress may work on meanwhile; None if one does, or if it has ended."""
        claim = Claim(self, batch_id)
        return claim if await claim.take() else None

    async def finish(self, batch_id: str) -> None:
        """Remove what is not needed of a batch that has ended. The claim is held."""
        await in_thread(shutil.rmtree, self.work(batch_id), ignore_errors=True)
        await self.unfinished.remove(batch_id)

    async def remove_expired(self) -> None:
        """Remove files that have expired, and what was left of batches that are not stored."""
        await self.files.remove_expired()
        for batch_id in os.listdir(self._work) if self._work.exists() else ():
            if age_s(batch_id, PREFIX) > DAY_S and await self.records.find(batch_id) is None:
                await in_thread(shutil.rmtree, self.work(batch_id), ignore_errors=True)

    async def cancelled_at(self, batch_id: str) -> int | None:
        """Return when a client asked to cancel the batch."""
        value = await self.values.get(_cancel_key(batch_id))
        return None if value is None else int(value)

    async def _with_cancel(self, batch: Batch) -> Batch:
        """Return the batch as it is with a request to cancel it that has not been handled yet."""
        if batch.status in ("validating", "in_progress"):
            batch.cancelling_at = await self.cancelled_at(batch.id)
            batch.status = batch.status if batch.cancelling_at is None else "cancelling"
        return batch


class Claim:
    """A batch that this ingress works on, by the lease of a job, until another one has taken it over."""

    record: BatchRecord

    def __init__(self, store: BatchStore, batch_id: str):
        self._lease = Lease(store.values, batch_id, self._restore)
        self._store, self._batch_id, self._stored = store, batch_id, b""

    async def take(self) -> bool:
        """Return whether the batch is this holder's now, unless it has ended or is no longer stored."""
        await self._store.values.settled()
        if not await self._lease.take():
            return False
        record = await self._store.records.find(self._batch_id)
        if record is not None and record.object.status not in ENDED:
            self.record, self._stored = record, record.encode()
            return True
        await self._store.finish(self._batch_id)
        await self._lease.release()
        return False

    async def save(self) -> None:
        """Store the record. Raises LeaseLost, and does nothing, if another ingress has changed it."""
        values, key, value = self._store.values, object_key(self._batch_id), self.record.encode()
        saved = await self._lease.renew() and (
            await values.replace(key, self._stored, value, TTL_S)
            or await values.get(key) == value  # it was stored before, and the store did not say so
        )
        if not saved:
            raise LeaseLost
        self._stored = value

    @asynccontextmanager
    async def held(self) -> AsyncGenerator[None]:
        """Keep the lease meanwhile, and then give it back; the present task is cancelled once another holder has it."""
        try:
            async with self._lease.kept():
                yield
        finally:
            with suppress(StoreUnavailable):
                if await self._lease.holds():
                    await self._lease.release()

    async def _restore(self) -> None:
        await self._store.values.add(object_key(self._batch_id), self._stored, TTL_S)
        await self._store.add(self.record)  # the lists that it is in


def _link_input(content: Path, work: Path) -> None:
    work.mkdir(mode=0o700, parents=True)
    os.link(content, work / INPUT)
    sync_folder(work)
    sync_folder(work.parent)


def _cancel_key(batch_id: str) -> str:
    return f"manta:cancel:{batch_id}"
