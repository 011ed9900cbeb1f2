"""Servers, ingress and engine in one process, that are killed under running streams and started again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.deployments.idempotency.server import NUM_TOKENS
from tests.redis_server import redis_server
from tests.resuming_client import ResumingClient
from tests.served_app import served_app

pytestmark = pytest.mark.slow
SERVER = "tests.deployments.idempotency.server"
NUM_CLIENTS = 12
BODY = {"prompt": "a", "max_tokens": NUM_TOKENS}
RUNNING = 10  # events after which a stream counts as running


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite://{tmp_path}/store.db"
        return
    with redis_server() as server:
        yield server.url


async def read_until(
    base_url: str, clients: list[ResumingClient], enough: Callable[[], bool], then: Callable[[], None] = lambda: None
) -> None:
    async with httpx.AsyncClient(base_url=base_url, timeout=60, limits=httpx.Limits(max_connections=None)) as http:
        reading = [asyncio.create_task(client.read(http)) for client in clients if not client.done]
        async with asyncio.timeout(120):
            while not enough():
                await asyncio.sleep(0.01)
        then()
        await asyncio.gather(*reading)


def have_more(clients: list[ResumingClient], count: list[int]) -> bool:
    """Each has so many events more than `count`, or all."""
    return all(client.done or len(client.ids) >= n + RUNNING for client, n in zip(clients, count, strict=True))


def test_every_client_has_the_whole_text_once_although_one_server_after_the_other_is_killed(url):
    clients = [ResumingClient(f"key {i}", BODY) for i in range(NUM_CLIENTS)]
    for kill in range(3):
        count = [len(client.ids) for client in clients]
        with served_app(SERVER, url) as (process, base_url):
            asyncio.run(read_until(base_url, clients, partial(have_more, clients, count), process.kill))
        assert not all(client.done for client in clients), kill
    with served_app(SERVER, url) as (_, base_url):
        asyncio.run(read_until(base_url, clients, lambda: all(c.done for c in clients)))
        for client in clients:
            whole = ResumingClient(client.key, BODY)  # the seed is the server's own, and in its store
            asyncio.run(read_until(base_url, [whole], partial(getattr, whole, "done")))
            assert client.text == whole.text and len(whole.text) == NUM_TOKENS
    assert len({client.text for client in clients}) > 1
