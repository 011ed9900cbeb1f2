"""Servers, ingress and engine in one process, that are killed under running streams and started again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any

import httpx
import pytest

from tests.deployments.jobs.server import NUM_TOKENS, letters_of
from tests.deployments.openai.batches.batches import ENDED, jsonl, line
from tests.redis_server import redis_server
from tests.resuming_client import ResumingClient
from tests.scrape import Scrape
from tests.served_app import served_app

pytestmark = pytest.mark.slow
SERVER = "tests.deployments.jobs.server"
NUM_CLIENTS = 12
BODY = {"prompt": "a", "max_tokens": NUM_TOKENS}
LIVE = ("queued", "in_progress")
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
        reading = [asyncio.create_task(client.read(http, base_url)) for client in clients if not client.done]
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


LINES = [line(f"line {i}", prompt="a", max_tokens=NUM_TOKENS, seed=i) for i in range(80)]


def started_batch(http: httpx.Client) -> str:
    upload = {"file": ("in.jsonl", jsonl(*LINES, line("wrong", top_p=7)))}
    file = http.post("/v1/files", files=upload, data={"purpose": "batch"}).raise_for_status().json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return str(http.post("/v1/batches", json=body).raise_for_status().json()["id"])


def batch_with(http: httpx.Client, batch_id: str, count: int) -> dict[str, Any]:
    """The batch once so many of its lines are answered, or it has ended."""
    deadline = time.monotonic() + 120
    while True:
        batch: dict[str, Any] = http.get(f"/v1/batches/{batch_id}").raise_for_status().json()
        if batch["status"] in ENDED or batch["request_counts"]["completed"] >= count:
            return batch
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_line_of_a_batch_is_answered_once_although_one_server_after_the_other_is_killed(url, tmp_path):
    """An answer that is written is not computed again, and each server knows of what the others do."""
    folder, answered = tmp_path / "batches", [b""]

    def kill(process: Popen[str]) -> None:
        process.kill()
        process.wait()
        outputs = [path.read_bytes() for path in (folder / "work" / batch_id).glob("output-*")]
        whole = [text[: text.rfind(b"\n") + 1] for text in outputs]
        answered.append(max(whole, key=len))
        assert all(answered[-1].startswith(text) for text in whole)

    with (
        served_app(SERVER, url, str(folder)) as (first, first_url),
        served_app(SERVER, url, str(folder)) as (second, second_url),
        httpx.Client(base_url=first_url, timeout=60) as one,
        httpx.Client(base_url=second_url, timeout=60) as other,
    ):
        batch_id = started_batch(one)
        batch_with(other, batch_id, 10)
        kill(first)
        batch_with(other, batch_id, answered[-1].count(b"\n") + 10)
        kill(second)
    with served_app(SERVER, url, str(folder)) as (_, base_url), httpx.Client(base_url=base_url, timeout=60) as http:
        batch = batch_with(http, batch_id, len(LINES) + 1)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": len(LINES) + 1, "completed": len(LINES), "failed": 1}
        output = http.get(f"/v1/files/{batch['output_file_id']}/content").content
        assert all(output.startswith(text) for text in answered)
        texts = {
            answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"]
            for answer in map(json.loads, output.splitlines())
        }
        assert output.count(b"\n") == len(LINES)
        assert texts == {f"line {i}": letters_of(i, NUM_TOKENS) for i in range(len(LINES))}
        computed = Scrape(http.get("/metrics").text).sum("vllm:request_success_total")
        assert computed == len(LINES) - answered[-1].count(b"\n") < len(LINES) - 10


def test_a_batch_is_cancelled_by_a_server_that_does_not_work_on_it(url, tmp_path):
    with (
        served_app(SERVER, url, str(tmp_path / "batches")) as (_, first_url),
        served_app(SERVER, url, str(tmp_path / "batches")) as (_, second_url),
        httpx.Client(base_url=first_url, timeout=60) as one,
        httpx.Client(base_url=second_url, timeout=60) as other,
    ):
        batch_id = started_batch(one)
        batch_with(one, batch_id, 1)
        for http in (one, other):
            assert http.post(f"/v1/batches/{batch_id}/cancel").json()["status"] in ("cancelling", "cancelled")
        batch = batch_with(other, batch_id, len(LINES) + 1)
        assert batch["status"] == "cancelled" and batch["request_counts"]["failed"] > 1


RESPONSE = {"input": "a", "max_output_tokens": NUM_TOKENS, "background": True}


def test_background_responses_are_answered_although_one_server_after_the_other_is_killed(url):
    """By whichever server is asked for them: with the seed, the id and the time of their first one."""
    found: dict[str, list[dict[str, Any]]] = {}

    def ask(base_url: str, *, to_the_end: bool) -> None:
        with httpx.Client(base_url=base_url, timeout=60) as http:
            if not found:
                for _ in range(NUM_CLIENTS):
                    made = http.post("/v1/responses", json=RESPONSE).raise_for_status().json()
                    found[made["id"]] = []
            deadline = time.monotonic() + 120
            for response_id, answers in found.items():
                while (answer := http.get(f"/v1/responses/{response_id}").raise_for_status().json())["status"] in LIVE:
                    if not to_the_end:
                        break
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                if answer["status"] not in LIVE:
                    answers.append(answer)

    for _ in range(2):
        with served_app(SERVER, url) as (process, base_url):
            ask(base_url, to_the_end=False)
            process.kill()
    with served_app(SERVER, url) as (_, base_url):
        ask(base_url, to_the_end=True)
    with served_app(SERVER, url) as (_, base_url):
        ask(base_url, to_the_end=True)
    for answers in found.values():
        assert len(answers) >= 2 and all(answer == answers[0] for answer in answers)
        assert answers[0]["status"] == "incomplete"  # max_output_tokens
    assert len({answers[0]["output"][0]["content"][0]["text"] for answers in found.values()}) > 1
