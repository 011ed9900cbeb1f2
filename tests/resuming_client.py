"""A client of streams with an Idempotency-Key, which goes on where it was when its connection has broken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

PAUSE_S = 0.2  # before it connects again
NOBODY_THERE = (502, 503, 504)


@dataclass(slots=True)
class ResumingClient:
    """connections: that were answered. ids: of its events, each of which comes once."""

    key: str
    body: dict[str, Any]
    text: str = ""
    ids: dict[str, None] = field(default_factory=dict)
    connections: int = 0
    done: bool = False

    async def read(self, http: httpx.AsyncClient, base_url: str) -> None:
        """Until the connection breaks, or the stream has ended."""
        headers = {"Idempotency-Key": self.key} | ({"Last-Event-ID": next(reversed(self.ids))} if self.ids else {})
        body, rest = {**self.body, "stream": True}, ""
        with suppress(httpx.HTTPError):
            async with http.stream("POST", f"{base_url}/v1/completions", json=body, headers=headers) as response:
                if response.status_code in NOBODY_THERE:
                    return
                assert response.status_code == 200, await response.aread()
                self.connections += 1
                async for piece in response.aiter_text():
                    *events, rest = (rest + piece).split("\n\n")
                    for event in events:
                        self._take(event)

    def _take(self, event: str) -> None:
        event_id, _, data = event.rpartition("\n")
        if not event_id:  # an error, and the end after it
            assert data == "data: [DONE]" or '"service_unavailable_error"' in data, (data, self.text, self.ids)
            return
        assert event_id.startswith("id: ") and event_id[4:] not in self.ids
        self.ids[event_id[4:]] = None
        if data == "data: [DONE]":
            self.done = True
        else:
            self.text += json.loads(data.removeprefix("data: "))["choices"][0]["text"]


async def read_all(
    clients: list[ResumingClient],
    url: Callable[[], str | None],
    limit_s: float,
    strike: Callable[[], None] | None = None,
    when: Callable[[], bool] = lambda: True,
) -> None:
    """Until each has its whole text. url: of the server; None while there is none.

    strike: called in a thread, once `when` is true.
    """

    async def read(client: ResumingClient, http: httpx.AsyncClient) -> None:
        while not client.done:
            if (base_url := url()) is not None:
                await client.read(http, base_url)
            await asyncio.sleep(0 if client.done else PAUSE_S)

    async def blow() -> None:
        if strike is None:
            return
        while not when():
            await asyncio.sleep(0.01)
        await asyncio.to_thread(strike)

    try:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with asyncio.timeout(limit_s), httpx.AsyncClient(limits=limits, timeout=60) as http:
            await asyncio.gather(blow(), *(read(client, http) for client in clients))
    except TimeoutError:
        left = [
            (client.key, client.connections, next(reversed(client.ids), None)) for client in clients if not client.done
        ]
        raise AssertionError(f"after {limit_s:g} s these clients have not their whole text: {left}") from None
