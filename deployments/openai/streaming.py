"""Server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Send

from deployments.openai.errors import describe

_encode = msgspec.json.Encoder().encode


class EventStream(StreamingResponse):
    """Closes its source as soon as the client is gone, not when the garbage collector gets there."""

    def __init__(self, events: AsyncGenerator[bytes]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)


async def stream(chunks: AsyncGenerator[msgspec.Struct]) -> EventStream:
    """Waits for the first chunk, so that a request refused by the engine is answered with its own HTTP status."""
    return EventStream(_events(await anext(chunks), chunks))


async def _events(first: msgspec.Struct, rest: AsyncGenerator[msgspec.Struct]) -> AsyncGenerator[bytes]:
    async with aclosing(rest):
        try:
            yield _event(first)
            async for chunk in rest:
                yield _event(chunk)
        except Exception as error:  # noqa: BLE001  whatever it is, the client has to be told inside the stream
            _, body = describe(error)
            yield _event(body)
    yield b"data: [DONE]\n\n"


def _event(body: msgspec.Struct) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"
