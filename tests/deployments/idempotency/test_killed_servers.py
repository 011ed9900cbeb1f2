"""Servers, ingress and engine in one process, that are killed under running streams and started again."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen

import httpx
import pytest

from tests.deployments.idempotency.server import NUM_TOKENS
from tests.processes import started
from tests.redis_server import redis_server

pytestmark = pytest.mark.slow
NUM_CLIENTS = 12
RUNNING = 10  # events after which a stream counts as running


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite://{tmp_path}/store.db"
        return
    with redis_server() as server:
        yield server.url


@contextmanager
def server(url: str) -> Iterator[tuple[Popen[str], str]]:
    command = [sys.executable, "-m", "tests.deployments.idempotency.server", url]
    with started(command, stdout=PIPE) as process:
        assert process.stdout is not None
        yield process, f"http://127.0.0.1:{int(process.stdout.readline())}"


@dataclass(slots=True)
class Client:
    """Has the stream of a key, connection by connection, as a browser's EventSource would."""

    key: str
    shown: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    done: bool = False

    async def read(self, client: httpx.AsyncClient) -> None:
        """Until the connection breaks, or the stream has ended."""
        headers = {"Idempotency-Key": self.key} | ({"Last-Event-ID": self.ids[-1]} if self.ids else {})
        body = {"prompt": "a", "max_tokens": NUM_TOKENS, "stream": True}
        buffer = ""
        with suppress(httpx.HTTPError):
            async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                assert response.status_code == 200, await response.aread()
                async for piece in response.aiter_text():
                    buffer += piece
                    *events, buffer = buffer.split("\n\n")
                    for event in events:
                        self.take(event)

    def take(self, event: str) -> None:
        event_id, data = event.split("\n")
        assert event_id not in self.ids
        self.ids.append(event_id.removeprefix("id: "))
        if data == "data: [DONE]":
            self.done = True
        else:
            self.shown.append(json.loads(data.removeprefix("data: "))["choices"][0]["text"])


async def read_until(
    base_url: str, clients: list[Client], enough: Callable[[], bool], then: Callable[[], None] = lambda: None
) -> None:
    async with httpx.AsyncClient(base_url=base_url, timeout=60, limits=httpx.Limits(max_connections=None)) as http:
        reading = [asyncio.create_task(client.read(http)) for client in clients if not client.done]
        async with asyncio.timeout(120):
            while not enough():
                await asyncio.sleep(0.01)
        then()
        await asyncio.gather(*reading)


def have_more(clients: list[Client], count: list[int]) -> bool:
    """Each has so many events more than `count`, or all."""
    return all(client.done or len(client.ids) >= n + RUNNING for client, n in zip(clients, count, strict=True))


def test_every_client_has_the_whole_text_once_although_one_server_after_the_other_is_killed(url):
    clients = [Client(f"key {i}") for i in range(NUM_CLIENTS)]
    for kill in range(3):
        count = [len(client.ids) for client in clients]
        with server(url) as (process, base_url):
            asyncio.run(read_until(base_url, clients, partial(have_more, clients, count), process.kill))
        assert not all(client.done for client in clients), kill
    with server(url) as (_, base_url):
        asyncio.run(read_until(base_url, clients, lambda: all(c.done for c in clients)))
        for client in clients:
            whole = Client(client.key)  # the seed is the server's own, and in its store
            asyncio.run(read_until(base_url, [whole], partial(getattr, whole, "done")))
            assert "".join(client.shown) == "".join(whole.shown) and len("".join(whole.shown)) == NUM_TOKENS
    assert len({"".join(client.shown) for client in clients}) > 1
