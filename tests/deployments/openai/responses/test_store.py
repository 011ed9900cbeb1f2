"""Stored responses: in memory, and in a real Redis that is shared and killed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest

from deployments.storage.config import StoreConfig
from tests.deployments.openai.responses.serving import ask, ask_streamed, prompt, serving
from tests.redis_server import RedisServer, redis_server


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def stored_in(server: RedisServer) -> dict[str, Any]:
    return {"store": StoreConfig(url=server.url)}


async def test_a_stored_response_outlives_its_ingress_where_a_store_is_configured(redis):
    async with serving("Good day.", **stored_in(redis)) as api:
        made = await ask(api)
    async with serving("Bye.", **stored_in(redis)) as api:
        found = await api.client.get(f"/v1/responses/{made['id']}")
        assert (found.status_code, found.json()) == (200, made)
        answer = await ask(api, previous_response_id=made["id"], input="and?")
        assert "Good day." in prompt(api) and answer["output"][0]["content"][0]["text"] == "Bye."
        assert (await api.client.delete(f"/v1/responses/{made['id']}")).status_code == 200
        gone = await api.client.get(f"/v1/responses/{made['id']}")
        assert gone.status_code == 404 and "stored for 86400 s" in gone.text


async def test_without_a_store_another_ingress_says_that_it_cannot_know():
    async with serving("a") as api:
        made = await ask(api)
    async with serving("a") as api:
        for path in ("", "/input_items"):
            answer = await api.client.get(f"/v1/responses/{made['id']}{path}")
            assert answer.status_code == 404
            assert "ingress.store" in answer.json()["error"]["message"]
        answer = await api.post("responses", input="a", previous_response_id=made["id"])
        assert answer.status_code == 404 and "ingress.store" in answer.text


async def test_with_redis_down_responses_are_answered_and_what_needs_it_is_a_503(redis):
    async with serving("Good day.", **stored_in(redis)) as api:
        made = await ask(api)
        redis.kill()
        answer = await api.post("responses", input="a")
        assert answer.status_code == 200 and answer.json()["store"] is False
        assert answer.headers["Warning"] == '299 manta "ignored: store"'
        assert (await ask_streamed(api))[-1]["response"]["store"] is False
        num_asked = len(api.engine.added)
        refused = [
            await api.client.get(f"/v1/responses/{made['id']}"),
            await api.client.delete(f"/v1/responses/{made['id']}"),
            await api.post("responses", input="a", previous_response_id=made["id"]),
            await api.post("responses", input="a", background=True),
        ]
        for answer in refused:
            assert answer.status_code == 503 and "Retry-After" in answer.headers
            assert answer.json()["error"]["code"] == "store_unavailable"
        assert len(api.engine.added) == num_asked


async def test_a_response_that_memory_cannot_hold_is_answered_and_not_stored():
    async with serving("a", store=StoreConfig(max_bytes=1024)) as api:
        answer = await api.post("responses", input="a" * 2000)
        assert answer.status_code == 200 and answer.json()["store"] is False
        assert "store" in answer.headers["Warning"]


async def test_a_stored_response_with_one_wrong_bit_is_an_error_by_name(tmp_path):
    config = StoreConfig(url=f"sqlite://{tmp_path}/store.db")
    async with serving("Good day.", store=config) as api:
        made = await ask(api)
        with sqlite3.connect(tmp_path / "store.db") as database:
            (value,) = database.execute("select value from stored").fetchone()
            damaged = value[:-20] + bytes([value[-20] ^ 1]) + value[-19:]
            database.execute("update stored set value = ?", (damaged,))
        answer = await api.client.get(f"/v1/responses/{made['id']}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "stored_value_corrupt")
