"""Responses that are computed whether their clients stay or not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from deployments.http.streaming import named_event
from deployments.idempotency.answers import AnswerReader
from deployments.openai.responses.response_body import LIVE, Response, ResponseEnd
from deployments.openai.responses.response_builder import ResponseBuilder
from deployments.openai.responses.store import ResponseStore, StoredResponse
from deployments.storage.key_value import StoreUnavailable

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0  # between two looks at whether another ingress was asked to cancel
CANCEL_TIMEOUT_S = 5.0  # for the ingress that runs a response to hear of it


class BackgroundResponse:
    """A response that this ingress computes."""

    def __init__(
        self,
        builder: ResponseBuilder,
        store: ResponseStore,
        owner: str,
        stored: StoredResponse,
        answer: AnswerReader | None,
    ):
        self._builder, self._store, self._owner, self._stored = builder, store, owner, stored
        self._answer = answer
        self._events: list[bytes] = []
        self._grown = asyncio.Event()  # another one after each event
        self._cancelled = self._ended = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> asyncio.Task[None]:
        """Raises StoreUnavailable, before anything is computed."""
        await self._store.renew_lease(self._owner, self._builder.response.id)
        await self._store.put(self._owner, self._stored)
        self._task = asyncio.create_task(self._run())
        return self._task

    async def cancel(self) -> None:
        """Return when the response has ended, as cancelled if it had not ended before."""
        self._cancelled = True
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def events(self, after: int) -> AsyncGenerator[bytes]:
        """Yield the events with sequence numbers above `after`, until the response has ended."""
        position = after + 1
        while True:
            grown, ended = self._grown, self._ended
            for event in self._events[position:]:
                position += 1
                yield event
            if ended:
                return
            await grown.wait()

    async def _run(self) -> None:
        heartbeat, response = asyncio.create_task(self._heartbeat()), self._builder.response
        try:
            async with aclosing(self._builder.events()) as events:
                async for event in events:
                    encoded = named_event(event)
                    if isinstance(event, ResponseEnd):
                        self._stored.events = [*self._events, encoded]
                        await self._save()
                    self._events.append(encoded)
                    self._wake()
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            if self._answer is not None:  # which goes on without its readers
                self._answer.cancel()
            if response.status in LIVE:
                response.status, response.completed_at = "cancelled", int(time.time())
                self._stored.events = self._events
            self._events = self._stored.events
            await self._save()
        finally:
            heartbeat.cancel()
            self._ended = True
            self._wake()

    async def _save(self) -> None:
        try:
            await self._store.put(self._owner, self._stored)
        except StoreUnavailable as error:
            logger.warning("background response lost response_id=%s error=%s", self._builder.response.id, error)

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                if await self._store.renew_lease(self._owner, self._builder.response.id):
                    self._cancelled = True
                    assert self._task is not None
                    self._task.cancel()
            except StoreUnavailable as error:
                logger.warning("no heartbeat of response_id=%s error=%s", self._builder.response.id, error)


class BackgroundResponses:
    """The background responses of an application, of which this ingress runs some."""

    def __init__(self, store: ResponseStore):
        self._store = store
        self._running: dict[tuple[str, str], BackgroundResponse] = {}

    async def start(
        self, builder: ResponseBuilder, owner: str, stored: StoredResponse, answer: AnswerReader | None
    ) -> BackgroundResponse:
        """answer: of a request with an Idempotency-Key. Raises StoreUnavailable."""
        key = (owner, builder.response.id)
        background = BackgroundResponse(builder, self._store, owner, stored, answer)
        task = await background.start()
        self._running[key] = background
        task.add_done_callback(lambda _: self._running.pop(key, None))
        return background

    def find(self, owner: str, response_id: str) -> BackgroundResponse | None:
        return self._running.get((owner, response_id))

    async def cancel(self, owner: str, response_id: str) -> Response:
        """End a response, and return it; still running if its ingress did not hear of it within CANCEL_TIMEOUT_S.

        Raises ResponseNotFound, StoreUnavailable.
        """
        if (background := self.find(owner, response_id)) is not None:
            await background.cancel()
        response = (await self._store.get(owner, response_id)).response
        if response.status in LIVE:
            await self._store.ask_to_cancel(owner, response_id)
        deadline = time.monotonic() + CANCEL_TIMEOUT_S
        while response.status in LIVE and time.monotonic() < deadline:
            await asyncio.sleep(HEARTBEAT_S / 4)
            response = (await self._store.get(owner, response_id)).response
        return response
