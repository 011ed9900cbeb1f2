"""The threads of an ingress that work on batches."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import asynccontextmanager

from starlette.types import ASGIApp

from deployments.http.context import BACKGROUND_CLIENT
from deployments.http.in_process import InProcessResponse, post
from deployments.openai.batches.config import BatchConfig
from deployments.openai.batches.input_file import BatchRequest
from deployments.openai.batches.objects import Batch
from deployments.openai.batches.records import Record
from deployments.openai.batches.run import BatchRun, Stopped, line_id
from deployments.openai.batches.store import BatchStore
from deployments.openai.served_models import ServedModels

logger = logging.getLogger(__name__)

NUM_THREADS = 4  # batches that one ingress works on at a time
POLL_S = 2.0  # between two looks for a batch whose ingress has died
PAUSE_S = 10.0  # after a failure of the disk
CLEAN_UP_S = 600.0
MAX_STOP_S = 10.0
RETRIED = (429, 503)  # the engines are busy or gone: the request can wait


class BatchWorker:
    """Sends the requests of batches to the application's own routes."""

    def __init__(self, app: ASGIApp, store: BatchStore, models: ServedModels, config: BatchConfig):
        self._app, self._store, self._models, self._config = app, store, models, config
        self._new_batches, self._stopping = threading.Semaphore(0), threading.Event()
        self._cleaned_up_at = -CLEAN_UP_S

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        self._loop = asyncio.get_running_loop()
        threads = [threading.Thread(target=self._work, daemon=True, name=f"batches-{i}") for i in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            self._new_batches.release(NUM_THREADS)
            for thread in threads:
                await asyncio.to_thread(thread.join, MAX_STOP_S)

    def wake(self) -> None:
        """Let one thread look for a new batch."""
        self._new_batches.release()

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                self._clean_up()
                pause_s = POLL_S if self._run_all() else PAUSE_S
            except Exception:  # the thread has to go on
                logger.exception("the folder of batches cannot be read")
                pause_s = PAUSE_S
            self._new_batches.acquire(timeout=pause_s)

    def _run_all(self) -> bool:
        """Work on each batch that nobody works on. Return whether none failed."""
        fine = True
        for batch_id in self._store.unfinished():
            try:
                with self._store.claim(batch_id) as record:
                    if record is not None and self._is_ours(record.object):
                        logger.info("batch begins batch_id=%s status=%s", batch_id, record.object.status)
                        self._run(record)
                        logger.info("batch ended batch_id=%s status=%s", batch_id, record.object.status)
            except Stopped:
                return True
            except Exception:  # one batch must not keep the others from running
                logger.exception("batch pauses batch_id=%s", batch_id)
                fine = False
        return fine

    def _run(self, record: Record[Batch]) -> None:
        BatchRun(self._store, record, self._models, self._send, self._max_in_flight, self._stopping.is_set).run()

    def _is_ours(self, batch: Batch) -> bool:
        """Whether its model is served here, or is no longer needed."""
        return batch.model is None or batch.model in self._models or time.time() >= batch.expires_at

    def _max_in_flight(self, batch: Batch) -> int:
        """While requests wait for its model, a batch goes on with a single one."""
        model = self._models.get(batch.model or "")
        waiting = any(model.admission.num_waiting for model in ([model] if model else self._models.values()))
        return 1 if waiting else self._config.max_in_flight

    def _send(self, record: Record[Batch], request: BatchRequest) -> Future[InProcessResponse]:
        return asyncio.run_coroutine_threadsafe(self._answer(record, request), self._loop)

    async def _answer(self, record: Record[Batch], request: BatchRequest) -> InProcessResponse:
        batch = record.object
        headers = {"x-request-id": line_id(batch, request)}
        while True:
            state = {BACKGROUND_CLIENT: f"batch:{record.owner or ''}"}
            response = await post(self._app, batch.endpoint, request.body, headers, state)
            if response.status not in RETRIED:
                return response
            await asyncio.sleep(int(response.headers["retry-after"]))

    def _clean_up(self) -> None:
        if time.monotonic() > self._cleaned_up_at + CLEAN_UP_S:
            self._cleaned_up_at = time.monotonic()
            self._store.remove_expired()
