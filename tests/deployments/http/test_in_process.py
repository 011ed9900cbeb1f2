"""Requests without a socket."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deployments.http.in_process import RefusedInProcess, answer, events


class Server:
    """Answers as told, and knows whether it was left alone in the middle of a stream."""

    def __init__(self) -> None:
        self.app, self.cancelled = FastAPI(), asyncio.Event()
        self.app.add_route("/echo", self.echo, methods=["POST"])
        self.app.add_route("/events", self.events, methods=["POST"])

    async def echo(self, request: Request) -> Response:
        return JSONResponse({"sent": await request.json(), "key": request.headers.get("authorization")})

    async def events(self, request: Request) -> Response:
        ends = (await request.json())["ends"]

        async def parts():
            try:
                yield b'data: {"n": 1}\n\nda'
                yield b'ta: {"n": 2}\n\n: a heartbeat\n\n'
                if ends:
                    yield b"data: [DONE]\n\n"
                else:
                    await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise

        return StreamingResponse(parts(), media_type="text/event-stream")


async def all_events(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    return [event async for event in events(server.app, path, body, {})]


def test_an_answer_is_what_the_route_says_with_the_headers_that_were_given():
    found = asyncio.run(answer(Server().app, "/echo", {"a": 1}, {"authorization": "Bearer k"}))
    assert found == {"sent": {"a": 1}, "key": "Bearer k"}


def test_events_come_one_by_one_wherever_the_server_has_cut_them():
    assert asyncio.run(all_events(Server(), "/events", {"ends": True})) == [{"n": 1}, {"n": 2}]


def test_whoever_leaves_a_stream_ends_the_request():
    async def leave() -> None:
        server = Server()
        async with aclosing(events(server.app, "/events", {"ends": False}, {})) as stream:
            assert await anext(stream) == {"n": 1}
        await asyncio.wait_for(server.cancelled.wait(), 60)

    asyncio.run(leave())


@pytest.mark.parametrize("sent", [answer(Server().app, "/none", {}, {}), all_events(Server(), "/none", {})])
def test_an_error_is_raised_with_its_status_and_body(sent):
    with pytest.raises(RefusedInProcess) as refused:
        asyncio.run(sent)
    assert refused.value.status == 404
    assert "Not Found" in refused.value.body
