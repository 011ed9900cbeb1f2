"""Requests that the server sends to itself, or that other deployments send by a handle. They undergo all checks, but
use no socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope, Send


@dataclass(slots=True)
class InProcessResponse:
    status: int = 500
    headers: Headers = field(default_factory=Headers)
    body: bytes = b""


async def post(
    app: ASGIApp, path: str, body: bytes, headers: dict[str, str], state: dict[str, Any]
) -> InProcessResponse:
    """Send JSON to a route. state: state of the request, which clients cannot set."""
    response = InProcessResponse()
    chunks: list[bytes] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            response.status, response.headers = message["status"], Headers(raw=message["headers"])
        else:
            chunks.append(message.get("body", b""))

    await _run(app, path, body, headers, state, send)
    response.body = b"".join(chunks)
    return response


class RefusedInProcess(Exception):
    """Raised when a request of another deployment is answered with an error. Has the HTTP status and body that clients
    see."""

    def __init__(self, status: int, body: str):
        super().__init__(status, body)
        self.status, self.body = status, body


async def answer(app: ASGIApp, path: str, body: Mapping[str, Any], headers: dict[str, str]) -> Any:
    """Return the JSON of a route's answer. Raises RefusedInProcess."""
    response = await post(app, path, msgspec.json.encode(body), headers, {})
    if response.status >= 400:
        raise RefusedInProcess(response.status, response.body.decode())
    return msgspec.json.decode(response.body)


async def events(app: ASGIApp, path: str, body: Mapping[str, Any], headers: dict[str, str]) -> AsyncGenerator[Any]:
    """Yield the JSON of each event of the stream that `body` asks for. Closing the generator ends the request. Raises
    RefusedInProcess."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()

    async def run() -> None:
        try:
            await _run(app, path, msgspec.json.encode(body), headers, {}, messages.put)
        finally:
            messages.put_nowait(None)

    running = asyncio.create_task(run())
    status, buffer = 500, b""
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                status = message["status"]
                continue
            buffer += message.get("body", b"")
            while status < 400 and b"\n\n" in buffer:
                event, _, buffer = buffer.partition(b"\n\n")
                data = b"".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
                if data and data != b"[DONE]":
                    yield msgspec.json.decode(data)
        if status >= 400:
            raise RefusedInProcess(status, buffer.decode())
    finally:
        running.cancel()


async def _run(
    app: ASGIApp, path: str, body: bytes, headers: dict[str, str], state: dict[str, Any], send: Send
) -> None:
    request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not request:
            await asyncio.Event().wait()  # no client can disconnect; whoever sends the request cancels it
        return request.pop()

    with suppress(Exception):  # it has become a response, and the log has it
        await app(_scope(path, body, headers, state), receive, send)


def _scope(path: str, body: bytes, headers: dict[str, str], state: dict[str, Any]) -> Scope:
    given = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body)), **headers}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": Headers(given).raw,
        "client": None,
        "server": None,
        "state": state,
    }
