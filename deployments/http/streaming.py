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
from starlette.types import Send

from deployments.http.errors import error_body
from deployments.idempotency.position import EventIds

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


class EventStream(StreamingResponse):
    """Closes its source as soon as the client disconnects, not when the garbage collector gets there."""

    def __init__(self, events: AsyncGenerator[bytes]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)


def unnamed_event(body: msgspec.Struct) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def named_event(body: msgspec.Struct) -> bytes:
    """Name the event by the tag of its struct."""
    return f"event: {body.__struct_config__.tag}\n".encode() + unnamed_event(body)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFormat:
    """The form in which an API writes the events of a stream; as it stands, that of OpenAI's completions."""

    encode: Callable[[msgspec.Struct], bytes] = unnamed_event
    error: Callable[[Exception], msgspec.Struct] = lambda error: error_body(error)[1]
    """Makes the event of an error, after which nothing but the end follows."""
    end: bytes = b"data: [DONE]\n\n"


OPENAI_EVENTS = EventFormat()


async def stream(
    chunks: AsyncGenerator[msgspec.Struct], event_format: EventFormat = OPENAI_EVENTS, ids: EventIds | None = None
) -> EventStream:
    """Wait for the first chunk, so that a request refused by the engine gets its own HTTP status."""
    first = await anext(chunks)
    if ids is not None:
        return EventStream(_numbered(first, chunks, event_format, ids))
    return EventStream(_events(first, chunks, event_format))


async def _events(
    first: msgspec.Struct, rest: AsyncGenerator[msgspec.Struct], event_format: EventFormat
) -> AsyncGenerator[bytes]:
    async with aclosing(rest):
        try:
            yield event_format.encode(first)
            async for chunk in rest:
                yield event_format.encode(chunk)
        except Exception as error:  # noqa: BLE001  whatever it is, the client has to be told inside the stream
            yield event_format.encode(event_format.error(error))
    yield event_format.end


async def _numbered(
    first: msgspec.Struct, rest: AsyncGenerator[msgspec.Struct], event_format: EventFormat, ids: EventIds
) -> AsyncGenerator[bytes]:
    """Yield the same, each event with its id, from the first on that the client does not have."""

    def encode(chunk: msgspec.Struct) -> bytes:
        number, event_id = ids.number, ids.next()
        if event_id is None:
            return b""
        if hasattr(chunk, "sequence_number"):
            chunk.sequence_number = number
        return event_id + event_format.encode(chunk)

    def error_of(error: Exception) -> msgspec.Struct:
        ids.fail()
        return event_format.error(error)

    events = _events(first, rest, EventFormat(encode=encode, error=error_of, end=b""))
    async with aclosing(events):
        async for event in events:
            if event:
                yield event
    if event_format.end and (event_id := ids.next()) is not None:
        yield event_id + event_format.end


async def run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it and raise ClientDisconnect as soon as the client disconnects.

    An HTTP server only reports a disconnect to an application that asks. The body must have been read before.
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
