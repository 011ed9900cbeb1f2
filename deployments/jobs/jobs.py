"""Jobs of an application. This ingress computes some of them."""

from __future__ import annotations

import asyncio

from deployments.jobs.errors import StreamNotFound
from deployments.jobs.job import Job
from deployments.jobs.lease import Lease
from deployments.jobs.record import JobRecord, record_key
from deployments.storage.key_value import KeyValueStore


class Jobs:
    def __init__(self, store: KeyValueStore, ttl_s: float):
        self._store, self._ttl_s = store, ttl_s
        self._live: dict[str, Job] = {}

    async def open(self, job_id: str, owner: str, new: JobRecord | None) -> Job:
        """Return the job with this id. If there is none, create it from `new`, if given.

        Raises StreamNotFound, StoreUnavailable, StoredValueCorrupt.
        """
        job = self._live.get(job_id) or await self._find(job_id, new)
        if job is None or job.record.owner != owner:
            raise StreamNotFound(job_id, self._ttl_s, self._store.shared)
        if job.started:  # a complete job is kept only by the store
            return job
        return self._live.setdefault(
            job_id, job
        )  # another request may have opened it while this one waited for the store

    async def _find(self, job_id: str, new: JobRecord | None) -> Job | None:
        stored = await JobRecord.load(self._store, job_id)
        record = stored or new
        if record is None:
            return None
        return Job(job_id, record, self._store, self._ttl_s, self.forget, stored=stored is not None)

    async def is_computed(self, job_id: str) -> bool:
        """Return whether some ingress is computing the job. Raises StoreUnavailable."""
        return await Lease(self._store, job_id).is_held()

    async def revoke(self, job_id: str, *, delete: bool) -> None:
        """Stop computing a job in any ingress. delete: delete it from the store too. Raises StoreUnavailable."""
        if (job := self._live.get(job_id)) is not None:
            await job.close()
        await Lease(self._store, job_id).seize()
        if delete:
            await self._store.delete(record_key(job_id))

    def forget(self, job: Job) -> None:
        """Drop a job from memory. Later requests for it read the store."""
        if self._live.get(job.job_id) is job:
            del self._live[job.job_id]

    async def close(self) -> None:
        """Stop computing all jobs of this ingress, so that others can continue."""
        await asyncio.gather(*(job.close(computed_again=True) for job in list(self._live.values())))
