"""Requests that the server sends to itself: all its checks, without a socket."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope


@dataclass(slots=True)
class InProcessResponse:
    status: int = 500
    headers: Headers = field(default_factory=Headers)
    body: bytes = b""


async def post(
    app: ASGIApp, path: str, body: bytes, headers: dict[str, str], state: dict[str, Any]
) -> InProcessResponse:
    """Send JSON to a route. state: of the request; what a client cannot say."""
    response = InProcessResponse()
    request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    chunks: list[bytes] = []

    async def receive() -> Message:
        if not request:
            await asyncio.Event().wait()  # nobody disconnects
        return request.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            response.status, response.headers = message["status"], Headers(raw=message["headers"])
        else:
            chunks.append(message.get("body", b""))

    given = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body)), **headers}
    scope: Scope = {
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
    with suppress(Exception):  # it has become a response, and the log has it
        await app(scope, receive, send)
    response.body = b"".join(chunks)
    return response
