"""Redis is killed under 50 running streams of two servers, and started again, with what it had stored or without it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import Popen

import httpx
import pytest
from redis import Redis

from deployments.jobs.lease import LEASE_S, lease_key
from tests.deployments.jobs.server import NUM_TOKENS, letters_of
from tests.redis_server import RedisServer, redis_server
from tests.resuming_client import ResumingClient, read_all
from tests.scrape import Scrape
from tests.served_app import served_app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SERVER = "tests.deployments.jobs.server"
NUM_KEYS = 50
LIMIT_S = 300.0
Server = tuple[Popen[str], str]


@contextmanager
def two_servers(redis: RedisServer) -> Iterator[tuple[Server, Server]]:
    with served_app(SERVER, redis.url) as one, served_app(SERVER, redis.url) as other:
        yield one, other


def clients_of(servers: tuple[Server, Server]) -> list[tuple[ResumingClient, str]]:
    """50 keys, half of them without a seed: their texts hang on what is stored as they begin. Every fifth has a second
    client, at the other server."""
    found = []
    for i in range(NUM_KEYS):
        body = {"prompt": "a", "max_tokens": NUM_TOKENS} | ({"seed": i} if i % 2 else {})
        found += [
            (ResumingClient(f"key {i}", body), servers[(i + second) % 2][1]) for second in range(1 + (i % 5 == 0))
        ]
    return found


async def read(clients: list[tuple[ResumingClient, str]]) -> None:
    urls = {url for _, url in clients}
    await asyncio.gather(
        *(read_all([client for client, at in clients if at == url], lambda url=url: url, LIMIT_S) for url in urls)
    )


def computed(servers: tuple[Server, Server]) -> float:
    """Answers that have ended, computed to the end or not."""
    scrapes = [Scrape(httpx.get(f"{url}/metrics", timeout=60).text) for _, url in servers]
    return sum(scrape.sum("vllm:request_success_total") for scrape in scrapes)


def leases(redis: RedisServer) -> int:
    with Redis.from_url(redis.url) as client:
        return len(client.keys(lease_key("*")))


@pytest.mark.parametrize("away_s", [2.0, 1.5 * LEASE_S])
@pytest.mark.parametrize("persistent", [True, False])
def test_each_of_50_streams_has_its_whole_text_and_is_computed_once_although_redis_was_killed(persistent, away_s):
    with redis_server(persistent) as redis, two_servers(redis) as servers:
        clients = clients_of(servers)

        def tell(number: int) -> None:
            for process, _ in servers:
                process.send_signal(number)

        async def strike() -> None:
            while len({client.key for client, _ in clients if client.text}) < NUM_KEYS:
                await asyncio.sleep(0.01)
            tell(signal.SIGUSR1)
            while leases(redis) + await asyncio.to_thread(computed, servers) > NUM_KEYS:
                await asyncio.sleep(0.05)  # what has ended is stored
            assert leases(redis) > 0.8 * NUM_KEYS
            redis.kill()
            await asyncio.sleep(away_s)  # this is the fault
            redis.start()
            tell(signal.SIGUSR2)

        async def scenario() -> None:
            await asyncio.gather(read(clients), strike())

        started = time.monotonic()
        asyncio.run(scenario())
        for client, _ in clients:
            texts = {other.text for other, _ in clients if other.key == client.key}
            assert texts == {client.text} and len(client.text) == NUM_TOKENS
            assert "seed" not in client.body or client.text == letters_of(client.body["seed"], NUM_TOKENS)
        assert computed(servers) == NUM_KEYS
        again = [(ResumingClient(client.key, client.body), url) for client, url in clients]
        asyncio.run(read(again))
        assert [client.text for client, _ in again] == [client.text for client, _ in clients]
        assert computed(servers) == NUM_KEYS
    broken = sum(client.connections > 1 for client, _ in clients)
    seconds = time.monotonic() - started
    print(f"\n| {persistent} | {away_s:g} | {len(clients)} | {broken} | {seconds:.0f} |")
