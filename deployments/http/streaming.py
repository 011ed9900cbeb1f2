"""Server-sent events, and work that stops as soon as the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from deployments.http.errors import error_body
from deployments.jobs.event_ids import NoEventIds

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


class EventStream(StreamingResponse):
    """Response that closes its source as soon as the client disconnects, not when the garbage collector runs."""

    def __init__(self, events: AsyncGenerator[bytes], first: bytes = b""):
        """first: event to send before the others."""
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events, self._first = events, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":  # nobody reads the events, which may be endless
            await self._events.aclose()
        await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if self._first:
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def unnamed_event(body: msgspec.Struct | msgspec.Raw) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def named_event(body: msgspec.Struct) -> bytes:
    """Return an event named by the tag of its struct."""
    return f"event: {body.__struct_config__.tag}\n".encode() + unnamed_event(body)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFormat:
    """Form in which an API writes the events of a stream; by default that of OpenAI's completions."""

    encode: Callable[[Any], bytes] = unnamed_event
    """Returns the event for a body."""
    error: Callable[[Exception], msgspec.Struct] = lambda error: error_body(error)[1]
    """Returns the body of an error's event, which is the last before the end."""
    end: bytes = b"data: [DONE]\n\n"


OPENAI_EVENTS, NO_IDS = EventFormat(), NoEventIds()


async def stream(
    chunks: AsyncGenerator[msgspec.Struct | msgspec.Raw],
    event_format: EventFormat = OPENAI_EVENTS,
    ids: NoEventIds = NO_IDS,
) -> EventStream:
    """Return a stream once the first event that the client lacks is known. So the HTTP status says whether a request is
    refused, for instance because it resumes a stream from a position that never existed."""
    events = _encoded(chunks, event_format, ids)
    try:
        first = await anext(events, b"")
        if ids.error is not None:
            raise ids.error  # although the API has already turned it into an event
    except BaseException:
        await events.aclose()
        raise
    return EventStream(events, first)


async def _encoded(
    chunks: AsyncGenerator[msgspec.Struct | msgspec.Raw], event_format: EventFormat, ids: NoEventIds
) -> AsyncGenerator[bytes]:
    """Yield the events that the client lacks, with their ids if they have ids. If an error occurs after the first of
    these events, it becomes the last event before the end."""
    begun = False
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                if (event_id := ids.next(chunk)) is not None:
                    begun = True
                    yield event_id + event_format.encode(chunk)
        if event_format.end and (event_id := ids.next()) is not None:
            yield event_id + event_format.end
    except Exception as error:  # whatever it is, the client gets it inside the stream
        if not begun:
            raise
        ids.fail(error)
        yield event_format.encode(event_format.error(error))
        if event_format.end:
            yield event_format.end


async def run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel it and raise ClientDisconnect.

    HTTP servers report a disconnect only to applications that ask. The body must have been read before.
    """
    work_task, disconnect_task = asyncio.create_task(work), asyncio.create_task(_until_disconnect(request))
    try:
        await asyncio.wait([work_task, disconnect_task], return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise ClientDisconnect
        return work_task.result()
    finally:
        disconnect_task.cancel()
        if not work_task.done():
            work_task.cancel()
            await asyncio.gather(work_task, return_exceptions=True)


async def _until_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
