"""One job: an answer that is found in the store, or computed in this ingress by a task that no client can interrupt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from functools import partial

from deployments.frontend.generation import LiveGeneration
from deployments.frontend.observers import SequenceObserver, SequenceView
from deployments.frontend.sequence_context import SequenceContext
from deployments.jobs.delta_log import DeltaLog, LoggedGeneration
from deployments.jobs.errors import AnswerNotReproducible, IdempotencyKeyInUse, LeaseLost
from deployments.jobs.event_ids import NoEventIds
from deployments.jobs.lease import Lease
from deployments.jobs.record import JobRecord, record_key
from deployments.served_adapter import ServedAdapter
from deployments.storage.key_value import KeyValueStore, StoreUnavailable
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.parts.costs import SequenceCost
from engine.wire.token_delta import TokenDelta

logger = logging.getLogger(__name__)

POLL_S = 0.25  # between polls of a job that another ingress computes


class LoggedSequence(SequenceObserver):
    """Writes the deltas of a sequence into the job's log. Their costs include those of earlier attempts."""

    def __init__(self, log: DeltaLog, sequence: SequenceView):
        self._log, self._sequence = log, sequence
        self._costs: dict[str, SequenceCost] = {}  # by attempt

    def arrived(self, delta: TokenDelta) -> None:
        for cost in delta.records(SequenceCost):
            self._costs[delta.request_id] = cost

    def received(self, delta: TokenDelta) -> TokenDelta:
        told = delta.records(SequenceCost)
        with_all = delta.telling(SequenceCost.total(self._costs.values())) if told else delta
        self._log.add((self._sequence.index, with_all))
        return delta


class Job:
    """An answer in use by this ingress."""

    def __init__(
        self,
        job_id: str,
        record: JobRecord,
        store: KeyValueStore,
        ttl_s: float,
        on_end: Callable[[Job], None],
        *,
        stored: bool,
    ):
        """on_end: function called once nothing more is to be computed. stored: whether the record comes from the
        store."""
        self.job_id, self.record, self._on_end = job_id, record, on_end
        self.num_requests = 0  #: number of requests for it being handled
        self._store, self._ttl_s, self._stored = store, ttl_s, stored
        self._key, self._lease = record_key(job_id), Lease(store, job_id, self._restore)
        self._starting = asyncio.Lock()
        self._log = DeltaLog()
        for choice, delta in enumerate(record.outputs or []):
            self._log.add((choice, delta))
        if record.outputs is not None:
            self._log.end()
        self._task: asyncio.Task[None] | None = None
        self._generation: LiveGeneration | None = None

    @property
    def started(self) -> bool:
        """Whether this ingress has begun to compute the answer, or the answer is complete."""
        return self._task is not None or self._log.ended

    @property
    def begun(self) -> bool:
        """Whether any ingress has begun to compute the answer."""
        return self._stored or self.started

    async def read(
        self,
        frontend: SequenceContext,
        prompts: list[list[GenerateRequest]],
        client: str,
        fingerprint: str | None,
        ids: NoEventIds,
    ) -> LoggedGeneration:
        """Return the answer from its start, and begin to compute it unless it is being computed already.

        fingerprint: fingerprint of the model that would compute it. ids: event ids of the reader's stream. Raises
        StoreUnavailable, IdempotencyKeyInUse, AnswerNotReproducible.
        """
        async with self._starting:
            if not self.started:
                leased = False
                if not self._stored:
                    leased = await self._add(fingerprint, _adapter(frontend, prompts))
                elif self.record.fingerprint != fingerprint:
                    raise AnswerNotReproducible(self.record.fingerprint, fingerprint)
                self._task = asyncio.create_task(self._run(frontend, self.record.seeded(prompts), client, leased))
        return LoggedGeneration(frontend, prompts, self._log, ids)

    async def close(self, *, computed_again: bool = False) -> None:
        """Stop computing. A complete answer is stored first. computed_again: whether another ingress will compute the
        answer."""
        if self._generation is not None and not self._log.ended:
            self._generation.computed_again = computed_again
        self.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])

    def cancel(self) -> None:
        """Stop computing, unless the answer is complete."""
        if self._task is not None and not self._log.ended:
            self._task.cancel()

    async def _add(self, fingerprint: str | None, adapter: ServedAdapter | None) -> bool:
        """Store the record, so that any ingress can compute the answer. Returns whether this ingress got the lease."""
        self.record.fingerprint, self.record.adapter = fingerprint, adapter
        # first the lease: whoever finds the record before this ingress has the lease may complete the answer
        leased = await self._lease.take(await self._store.settled())
        added = await self._store.add(self._key, self.record.encode(), self._ttl_s)
        if not added:
            if leased:
                await self._lease.release()
            raise IdempotencyKeyInUse
        self._stored = True
        return leased

    async def _run(
        self, frontend: SequenceContext, prompts: list[list[GenerateRequest]], client: str, leased: bool
    ) -> None:
        was_begun, resumes = not leased, False
        try:
            if not leased:
                leased = await self._take_over()
                resumes = not self.record.failed  # else whoever added it has charged for its prompt
            if leased:
                await self._set_failed(False)
                self._generation = LiveGeneration(
                    frontend, prompts, client, (partial(LoggedSequence, self._log),), resumes=resumes
                )
                await self._compute(self._generation)
            self._log.end()
            if leased:
                await self._save()
        except asyncio.CancelledError:
            await self._fail(LeaseLost(), was_begun)
        except Exception as error:  # noqa: BLE001  readers get it
            await self._fail(error, was_begun)
        finally:
            self._generation = None  # it refers to this job, and to images that should leave memory
            self._on_end(self)

    async def _take_over(self) -> bool:
        """Wait until no other ingress computes the answer. Returns False if the answer is then complete.

        Raises StoreUnavailable, StoredValueCorrupt.
        """
        while True:
            leased = await self._lease.take(await self._store.settled())
            record = self.record = await JobRecord.load(self._store, self.job_id) or self.record
            for choice, delta in enumerate(record.outputs or []):
                self._log.add((choice, delta))
            if leased or record.outputs is not None:
                return leased and record.outputs is None
            await asyncio.sleep(POLL_S)

    async def _compute(self, generation: LiveGeneration) -> None:
        def taken() -> None:
            generation.computed_again = True

        async with self._lease.kept(taken), aclosing(generation.chunks()) as chunks:
            async for _ in chunks:
                pass

    async def _set_failed(self, failed: bool) -> None:
        if self.record.failed is not failed:
            known, self.record.failed = self.record.encode(), failed
            # else another ingress may have completed the answer since the record was read
            await self._store.replace(self._key, known, self.record.encode(), self._ttl_s)

    async def _restore(self) -> bool:
        return await self.record.restore(self._store, self.job_id, self._ttl_s)

    async def _save(self) -> None:
        if await self._lease.renew():
            self.record.outputs = self._log.outputs()
            await self._store.set(self._key, self.record.encode(), self._ttl_s)
            await self._lease.release()

    async def _fail(self, error: Exception, was_begun: bool) -> None:
        """End the log with an error, and release the lease so that other ingresses can continue. An answer that fails
        before its first token is deleted, so that its key is free.

        was_begun: whether it was begun before, so that clients may have tokens of it. Then it is kept."""
        if self._log.ended:
            logger.warning("job not stored job_id=%s error=%s", self.job_id, error)
        else:
            self._log.end(error)
        try:
            if await self._lease.holds():
                if not isinstance(error, LeaseLost):
                    kept = self._log.entries or was_begun
                    await (self._set_failed(True) if kept else self._store.delete(self._key))
                await self._lease.release()
        except StoreUnavailable as unavailable:
            logger.warning("lease not released job_id=%s error=%s", self.job_id, unavailable)


def _adapter(frontend: SequenceContext, prompts: list[list[GenerateRequest]]) -> ServedAdapter | None:
    """Return the adapter of the requests, which all have the same one; None if they have none."""
    lora = prompts[0][0].record(ModelAdapter)
    return None if lora is None else ServedAdapter.of(lora, frontend.model)
