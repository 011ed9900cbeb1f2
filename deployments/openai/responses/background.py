"""Background responses: computed by jobs whether or not their clients stay connected."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from deployments.http.streaming import named_event
from deployments.jobs.delta_log import Log
from deployments.jobs.errors import LeaseLost
from deployments.jobs.jobs import Jobs
from deployments.openai.responses.response_body import LIVE, Response, ResponseEnd
from deployments.openai.responses.response_builder import ResponseBuilder
from deployments.openai.responses.store import ResponseStore, StoredResponse
from deployments.storage.key_value import StoreUnavailable

logger = logging.getLogger(__name__)


class BackgroundResponse:
    """A response that this ingress builds from its job, and stores at the end."""

    def __init__(self, builder: ResponseBuilder, store: ResponseStore, owner: str, stored: StoredResponse):
        self.stored = stored
        self._builder, self._store, self._owner = builder, store, owner
        self._events = Log[bytes]()
        self.task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop building the response. Returns once its events have ended."""
        self.task.cancel()
        await asyncio.wait([self.task])
        self.stored.events = self._events.entries

    def events(self, after: int) -> AsyncGenerator[bytes]:
        """Yield the events with sequence numbers above `after`, until the last."""
        return self._events.follow(after + 1)

    async def _run(self) -> None:
        try:
            async with aclosing(self._builder.events()) as events:
                async for event in events:
                    if isinstance(self._builder.error, LeaseLost):
                        return  # another ingress continues the job, or has cancelled it
                    encoded = named_event(event)
                    if isinstance(event, ResponseEnd):
                        self.stored.events = [*self._events.entries, encoded]
                        await self._save()
                    self._events.add(encoded)
        finally:
            self._events.end()

    async def _save(self) -> None:
        try:
            await self._store.put(self._owner, self.stored)
        except StoreUnavailable as error:
            logger.warning("background response lost response_id=%s error=%s", self.stored.response.id, error)


class BackgroundResponses:
    """The background responses of an application, of which this ingress builds some."""

    def __init__(self, store: ResponseStore, jobs: Jobs):
        self._store, self._jobs = store, jobs
        self._running: dict[tuple[str, str], BackgroundResponse] = {}

    def start(self, builder: ResponseBuilder, owner: str, stored: StoredResponse) -> BackgroundResponse:
        """Return the background response, and start to build it in this ingress unless it has started already."""
        key = (owner, stored.response.id)
        if key not in self._running:
            self._running[key] = BackgroundResponse(builder, self._store, owner, stored)
            self._running[key].task.add_done_callback(lambda _: self._running.pop(key, None))
        return self._running[key]

    def find(self, owner: str, response_id: str) -> BackgroundResponse | None:
        return self._running.get((owner, response_id))

    async def is_abandoned(self, stored: StoredResponse) -> bool:
        """Return whether a response has not ended and no ingress computes it. Raises StoreUnavailable."""
        return stored.response.status in LIVE and not await self._jobs.is_computed(stored.job_id)

    async def cancel(self, owner: str, response_id: str, *, delete: bool = False) -> Response:
        """End a response, whichever ingress computes it, and return it. delete: whether to delete it and its job too.

        Raises ResponseNotFound, StoreUnavailable.
        """
        stored = await self._store.get(owner, response_id)
        if (running := self.find(owner, response_id)) is not None:
            await running.stop()
            stored = running.stored
        if stored.job_id and (delete or stored.response.status in LIVE):
            await self._jobs.revoke(stored.job_id, delete=delete)
        if stored.response.status in LIVE:
            stored.response.status, stored.response.completed_at = "cancelled", int(time.time())
            await self._store.put(owner, stored)
        if delete:
            await self._store.delete(owner, response_id)
        return stored.response
