"""Runs the batches of all owners in an ingress."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from starlette.types import ASGIApp

from deployments.http.context import API_KEY_NAME, BACKGROUND_CLIENT, SOURCE
from deployments.http.in_process import InProcessResponse, post
from deployments.jobs.record import JobRecord
from deployments.jobs.source import DerivedSource
from deployments.openai.batches.config import BatchConfig
from deployments.openai.batches.input_file import BatchRequest
from deployments.openai.batches.objects import Batch
from deployments.openai.batches.records import Record
from deployments.openai.batches.run import BatchRun, line_id
from deployments.openai.batches.store import BatchLease, BatchRecord, BatchStore
from deployments.openai.served.served_models import ServedModels

logger = logging.getLogger(__name__)

MAX_RUNNING = 4  # batches of one owner that an ingress runs at a time
POLL_S = 2.0  # between checks for batches whose ingress has died
PAUSE_S = 10.0  # after a disk failure
LONGEST_WAIT_S = 60  # before a refused request is sent again; its limits may have been raised meanwhile
CLEAN_UP_S = 600.0
RETRIED = (429, 503)  # statuses after which a request waits, because the engines are busy or gone


class BatchWorker:
    """Sends the requests of batches to the application's own routes.

    Up to MAX_RUNNING batches of every owner run at the same time. Their requests take turns in their model's queue,
    where all batches of one owner count as one client.
    """

    def __init__(self, app: ASGIApp, store: BatchStore, models: ServedModels, config: BatchConfig, max_body_bytes: int):
        self._app, self._store, self._models, self._config = app, store, models, config
        self._max_body_bytes = max_body_bytes
        self._running: dict[str, asyncio.Task[None]] = {}
        self._num_running = Counter[str | None]()  # by owner
        self._sources = defaultdict[str, set[DerivedSource]](set)  # of the lines that are being answered, by batch
        self._woken = asyncio.Event()
        self._cleaned_up_at = -CLEAN_UP_S

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        task = asyncio.create_task(self._work())
        try:
            yield
        finally:
            tasks = [task, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        """Check for new batches now."""
        self._woken.set()

    async def _work(self) -> None:
        while True:
            self._woken.clear()
            pause_s = POLL_S
            try:
                await self._clean_up()
                await self._start_batches()
            except Exception:  # keep this task running
                logger.exception("batches cannot be read")
                pause_s = PAUSE_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def _start_batches(self) -> None:
        """Start the batches that no ingress works on, oldest first, within the limit of each owner."""
        await self._models.read()
        for batch_id in await self._store.unfinished.all():
            if batch_id in self._running:
                continue
            record = await self._store.records.find(batch_id)
            if (record is None or self._is_ours(record)) and (claim := await self._store.claim(batch_id)) is not None:
                self._num_running[claim.record.owner] += 1
                self._running[batch_id] = asyncio.create_task(self._run(claim))

    async def _run(self, claim: BatchLease) -> None:
        batch, owner = claim.record.object, claim.record.owner
        leave = partial(self._leave, batch.id)
        run = BatchRun(self._store, claim, self._models, self._max_body_bytes, self._answer, self._max_in_flight, leave)
        try:
            async with claim.held():
                logger.info("batch begins batch_id=%s status=%s", batch.id, batch.status)
                await run.run()
                logger.info("batch ended batch_id=%s status=%s", batch.id, batch.status)
        except Exception:  # one batch must not stop the others
            logger.exception("batch pauses batch_id=%s", batch.id)
            await asyncio.sleep(PAUSE_S)
        finally:
            del self._running[batch.id]
            self._sources.pop(batch.id, None)
            self._num_running[owner] -= 1
            self.wake()

    def _is_ours(self, record: BatchRecord) -> bool:
        """Return whether this ingress can run a batch now: its owner is below the limit, and this ingress has its model
        and folder. A batch whose window is over needs neither model nor folder."""
        batch = record.object
        if self._num_running[record.owner] >= MAX_RUNNING:
            return False
        served = batch.model is None or batch.model in self._models
        return (served and self._store.work(batch.id).exists()) or time.time() >= batch.expires_at

    def _max_in_flight(self, batch: Batch) -> int:
        """Return the configured number of requests, or 1 while requests wait for the batch's model."""
        model = self._models.get(batch.model or "")
        waiting = any(model.admission.num_waiting for model in ([model] if model else self._models.values()))
        return 1 if waiting else self._config.max_in_flight

    async def _answer(self, record: Record[Batch], request: BatchRequest) -> InProcessResponse:
        batch = record.object
        headers, source = {"x-request-id": line_id(batch, request)}, source_of(batch, request)
        state: dict[str, object] = {BACKGROUND_CLIENT: f"batch:{record.owner or ''}", SOURCE: source}
        if record.owner is not None:  # the request acts for its owner in what it stores and reads
            state[API_KEY_NAME] = record.owner
        self._sources[batch.id].add(source)
        try:
            while True:
                response = await post(self._app, batch.endpoint, request.body, headers, dict(state))
                if response.status not in RETRIED:
                    return response
                await asyncio.sleep(min(int(response.headers["retry-after"]), LONGEST_WAIT_S))
        finally:
            self._sources[batch.id].discard(source)

    def _leave(self, batch_id: str) -> None:
        """Let the lines that are being answered be computed again, and paid for only then."""
        for source in self._sources[batch_id]:
            source.leave()

    async def _clean_up(self) -> None:
        if time.monotonic() > self._cleaned_up_at + CLEAN_UP_S:
            self._cleaned_up_at = time.monotonic()
            await self._store.remove_expired()


def source_of(batch: Batch, request: BatchRequest) -> DerivedSource:
    """Return the source of a line's answer. Its secret depends only on the batch and the line's number."""
    secret = hashlib.sha256(line_id(batch, request).encode()).hexdigest()[:32]
    return DerivedSource(JobRecord("", batch.endpoint, b"", [], batch.created_at, secret))
