"""Whatever is killed under 100 streams: each client ends with the text of a run without a fault, no token twice.

`pytest -s` prints how many of them had to connect again.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from deployments.jobs.record import JobRecord, record_key
from deployments.storage.key_value import CHECKSUM_BYTES
from tests.resuming_client import ResumingClient, read_all
from tests.scrape import Scrape
from tests.serve.serve_run import ServeRun, wait_until

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy for Linux only"),
]
NUM_KEYS, NUM_CLIENTS = 90, 100  # ten keys have two clients
LIMIT_S = 400.0
STARTUP_S = 480.0  # a busy machine takes long
REPLICAS = 2
INGRESS = "ray::ServeReplica:manta:ingress"
BODIES: list[dict[str, Any]] = [
    {"prompt": f"The story of number {i} is", "max_tokens": 1200, "ignore_eos": True}
    | ({"temperature": 1.0, "seed": i} if i % 2 else {"temperature": 0})
    for i in range(NUM_KEYS)
]


class Serving:
    """`manta serve` with several ingresses, two engines, HAProxy in front, and a store that outlives them."""

    def __init__(self, folder: Path, key: str = "", **ingress: Any):
        """key: API key that may fetch metrics. ingress: further options."""
        self.store = folder / "store.db"
        self._folder, self._key = folder, key
        self._ingress = {"store": f"sqlite://{self.store}", "num_replicas": 2, **ingress}
        self.server: ServeRun | None = None

    def start(self) -> None:
        model = {
            "name": "pocket",
            "model": "pocket",
            "engine": {"device": "cpu", "num_threads": 1},
            "decode": {"num_cpus": 0.3, "num_replicas": REPLICAS},
        }
        args = {"models": [model], "ingress": self._ingress}
        server = ServeRun(self._folder, args, manta=True)
        self.server = server  # also if it does not come up: it has to be stopped
        for _ in range(REPLICAS):
            server.wait_for_line("replica ready", STARTUP_S)
        wait_until(self.is_whole, STARTUP_S)

    def stop(self) -> None:
        """SIGKILL for everything."""
        if self.server is not None:
            server, self.server = self.server, None
            server.stop()

    @property
    def url(self) -> str | None:
        return None if self.server is None else self.server.url

    def processes(self, name: str) -> list[psutil.Process]:
        """By their title, or program."""
        assert self.server is not None
        found = []
        for process in self.server.processes():
            try:
                if process.name() == name or " ".join(process.cmdline()).startswith(name):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def is_whole(self) -> bool:
        try:
            up = self.scrape().sum("manta_up")
        except (httpx.HTTPError, AssertionError):  # there is no ingress, or no proxy
            return False
        return up == REPLICAS and len(self.processes(INGRESS)) == self._ingress["num_replicas"]

    def computed(self) -> float:
        """Sequences that were computed to their end, by all ingresses."""
        return self.scrape().sum("vllm:request_success_total")

    def scrape(self) -> Scrape:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        answer = httpx.get(f"{self.url}/metrics", headers=headers, timeout=20)
        assert answer.status_code == 200, answer.text
        return Scrape(answer.text)


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Iterator[Serving]:
    serving = Serving(tmp_path_factory.mktemp("serve"))
    try:
        yield serving
    finally:
        serving.stop()


@pytest.fixture
def serving(kept) -> Serving:
    if kept.server is None:
        kept.start()
    wait_until(kept.is_whole, STARTUP_S)
    return kept


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    """Of the run without a fault, once it is made."""
    return {}


@pytest.fixture
def expected(serving, texts) -> list[str]:
    if not texts:
        clients = [ResumingClient(f"whole {i}", body) for i, body in enumerate(BODIES)]
        asyncio.run(read_all(clients, lambda: serving.url, LIMIT_S))
        assert {client.connections for client in clients} == {1}
        texts["whole"] = [client.text for client in clients]
        assert len(set(texts["whole"])) > 0.9 * NUM_KEYS
    return texts["whole"]


def strike(serving: Serving, expected: list[str], name: str, blow: Callable[[], None]) -> list[ResumingClient]:
    """Returns the clients, all of which have the whole text."""
    clients = [ResumingClient(f"{name} {i % NUM_KEYS}", BODIES[i % NUM_KEYS]) for i in range(NUM_CLIENTS)]
    running: list[int] = []

    def strike() -> None:
        running.append(NUM_KEYS - len({client.key for client in clients if client.done}))
        blow()

    def all_run() -> bool:
        """Of two clients with one key the one whose request came to the other ingress gets its text at the end."""
        return len({client.key for client in clients if client.text}) == NUM_KEYS

    asyncio.run(read_all(clients, lambda: serving.url, LIMIT_S, strike, all_run))
    assert running[0] > 0.9 * NUM_KEYS
    assert [client.text for client in clients] == [expected[i % NUM_KEYS] for i in range(NUM_CLIENTS)]
    again = sum(client.connections > 1 for client in clients)
    print(
        f"\n| {name} | {running[0]} of {NUM_KEYS} keys unfinished | {again} of {NUM_CLIENTS} clients connected again |"
    )
    return clients


def kill(process: psutil.Process) -> None:
    process.kill()
    psutil.wait_procs([process], timeout=30)


def test_no_client_connects_again_when_a_rank_dies(serving, expected):
    before = serving.computed()
    clients = strike(serving, expected, "a rank", lambda: kill(serving.processes("ray::RankActor")[0]))
    assert {client.connections for client in clients} == {1}
    assert serving.computed() - before == NUM_KEYS


def test_the_clients_of_an_ingress_that_dies_connect_again_and_no_others(serving, expected):
    victim = serving.processes(INGRESS)[0]
    clients = strike(serving, expected, "an ingress", lambda: kill(victim))
    assert {client.connections > 1 for client in clients} == {True, False}


def test_clients_connect_again_when_haproxy_dies_and_nothing_is_computed_again(serving, expected):
    before = serving.computed()

    def blow() -> None:
        for process in serving.processes("haproxy"):
            kill(process)

    clients = strike(serving, expected, "HAProxy", blow)
    assert any(client.connections > 1 for client in clients)
    assert serving.computed() - before == NUM_KEYS


def test_after_everything_was_killed_each_answer_that_was_left_is_computed_once(serving, expected):
    left: list[int] = []

    def blow() -> None:
        serving.stop()
        with sqlite3.connect(serving.store) as database:
            rows = database.execute("select value from stored where key like ?", [record_key("%")]).fetchall()
        records = (msgspec.msgpack.decode(value[CHECKSUM_BYTES:], type=JobRecord) for (value,) in rows)
        left.append(sum(record.outputs is None for record in records))
        serving.start()

    strike(serving, expected, "everything", blow)
    assert left[0] > 0.9 * NUM_KEYS
    assert serving.computed() == left[0]
