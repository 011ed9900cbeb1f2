"""The store of responses: its limits, and a real Redis that is shared, killed and held."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import AppConfig
from deployments.openai.responses import store as store_module
from deployments.openai.responses.errors import StoreUnavailable
from deployments.openai.responses.store import MemoryBackend, RedisBackend, ResponseStoreConfig
from engine.errors import ConfigError
from tests.deployments.openai.responses.serving import ask, ask_streamed, prompt, run, serving
from tests.redis_server import RedisServer, redis_server


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def stored_in(server: RedisServer) -> dict[str, Any]:
    return {"responses": ResponseStoreConfig(url=server.url)}


def test_a_stored_response_outlives_its_ingress_where_a_store_is_configured(redis):
    async def scenario() -> None:
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

    run(scenario())


def test_without_a_store_another_ingress_says_that_it_cannot_know():
    async def scenario() -> None:
        async with serving("a") as api:
            made = await ask(api)
        async with serving("a") as api:
            for path in ("", "/input_items"):
                answer = await api.client.get(f"/v1/responses/{made['id']}{path}")
                assert answer.status_code == 404
                assert "ingress.response_store" in answer.json()["error"]["message"]
            answer = await api.post("responses", input="a", previous_response_id=made["id"])
            assert answer.status_code == 404 and "ingress.response_store" in answer.text

    run(scenario())


def test_with_redis_down_responses_are_answered_and_what_needs_it_is_a_503(redis):
    async def scenario() -> None:
        async with serving("Good day.", **stored_in(redis)) as api:
            made = await ask(api)
            redis.process.kill()
            redis.process.wait()
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

    run(scenario())


def test_a_redis_that_does_not_answer_is_waited_for_no_longer_than_its_deadline(redis, monkeypatch):
    async def scenario() -> None:
        backend = RedisBackend(redis.url)
        monkeypatch.setattr(store_module, "REDIS_TIMEOUT_S", 10.0)
        await backend.set("a", b"1", 60)
        monkeypatch.setattr(store_module, "REDIS_TIMEOUT_S", 0.05)
        redis.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(StoreUnavailable, match="TimeoutError"):
                await backend.get("a")
        finally:
            redis.process.send_signal(signal.SIGCONT)
        monkeypatch.setattr(store_module, "REDIS_TIMEOUT_S", 10.0)
        assert await backend.get("a") == b"1"

    run(scenario())


def test_redis_forgets_a_response_after_its_time(redis):
    async def scenario() -> None:
        backend = RedisBackend(redis.url)
        await backend.set("a", b"1", 0.001)
        async with asyncio.timeout(5):
            while await backend.get("a") is not None:
                await asyncio.sleep(0.001)

    run(scenario())


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12)), max_size=40))
def test_memory_holds_the_newest_values_that_fit(puts):
    async def scenario() -> None:
        backend, newest = MemoryBackend(max_bytes=20), list[tuple[str, int]]()
        for key, size in puts:
            await backend.set(key, b"x" * size, 60)
            newest = [(other, length) for other, length in newest if other != key] + [(key, size)]
            while sum(length for _, length in newest) > 20:
                newest.pop(0)
            for other in "abcdef":
                value = await backend.get(other)
                assert (None if value is None else len(value)) == dict(newest).get(other)

    asyncio.run(scenario())


def test_memory_forgets_a_value_after_its_time_and_refuses_one_that_can_never_fit():
    async def scenario() -> None:
        backend = MemoryBackend(max_bytes=20)
        await backend.set("old", b"x" * 10, 0.0)
        assert await backend.get("old") is None
        with pytest.raises(StoreUnavailable, match="21 bytes"):
            await backend.set("large", b"x" * 21, 60)

    run(scenario())


def test_a_response_that_memory_cannot_hold_is_answered_and_not_stored():
    async def scenario() -> None:
        async with serving("a", responses=ResponseStoreConfig(max_bytes=1024)) as api:
            answer = await api.post("responses", input="a" * 2000)
            assert answer.status_code == 200 and answer.json()["store"] is False
            assert "store" in answer.headers["Warning"]

    run(scenario())


def test_a_store_that_is_no_redis_or_has_no_client_is_refused_at_the_start(monkeypatch):
    models = [{"name": "m", "model": "pocket"}]
    with pytest.raises(ConfigError, match="redis://host:6379/0"):
        AppConfig.parse({"models": models, "ingress": {"response_store": "postgres://a"}})
    monkeypatch.setattr(store_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="manta-serve\\[redis\\]"):
        AppConfig.parse({"models": models, "ingress": {"response_store": "redis://a"}})
