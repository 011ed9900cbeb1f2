"""Server-sent events, and work that stops as soon as the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Send

from deployments.http.errors import error_body

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


async def stream(chunks: AsyncGenerator[msgspec.Struct]) -> EventStream:
    """Wait for the first chunk, so that a request refused by the engine gets its own HTTP status."""
    return EventStream(_events(await anext(chunks), chunks))


async def _events(first: msgspec.Struct, rest: AsyncGenerator[msgspec.Struct]) -> AsyncGenerator[bytes]:
    async with aclosing(rest):
        try:
            yield _event(first)
            async for chunk in rest:
                yield _event(chunk)
        except Exception as error:  # noqa: BLE001  whatever it is, the client has to be told inside the stream
            _, body = error_body(error)
            yield _event(body)
    yield b"data: [DONE]\n\n"


def _event(body: msgspec.Struct) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


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
