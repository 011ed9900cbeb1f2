"""Responses in the background: they outlast their clients, and with a store their ingress."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployments.jobs import lease as lease_module
from deployments.storage.config import StoreConfig
from engine.errors import EngineError
from engine.wire.token_delta import ErrorInfo
from tests.deployments.fake_api import FakeApi, until
from tests.deployments.openai.responses.serving import ask, client_of, parse_events, serving
from tests.redis_server import redis_server

LIVE = ("queued", "in_progress")


async def ended(api: FakeApi, response_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            answer = await api.client.get(f"/v1/responses/{response_id}")
            assert answer.status_code == 200, answer.text
            if answer.json()["status"] not in LIVE:
                return dict(answer.json())
            await asyncio.sleep(0.005)


async def test_a_background_response_is_answered_at_once_and_found_when_it_is_done():
    async with serving("Good day.") as api:
        api.engine.paused.set()
        made = await client_of(api).responses.create(model="fake", input="hello", background=True)
        assert made.status == "queued"
        assert (await client_of(api).responses.retrieve(made.id)).status == "queued"
        api.engine.paused.clear()
        found = await ended(api, made.id)
        assert found["status"] == "completed" and found["output"][0]["content"][0]["text"] == "Good day."


async def test_a_stream_of_a_background_response_can_be_taken_up_where_it_was_left():
    async with serving("Good day.") as api:
        made = await api.post("responses", input="hello", background=True, stream=True)
        events = parse_events(made.text)
        assert [e["type"] for e in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
        path = f"/v1/responses/{events[0]['response']['id']}?stream=true"
        again = await api.client.get(path)
        assert again.text == made.text
        later = await api.client.get(f"{path}&starting_after=5")
        assert made.text.endswith(later.text) and '"sequence_number":6' in later.text.split("\n\n")[0]
        stream = await client_of(api).responses.retrieve(events[0]["response"]["id"], stream=True)
        assert [event.sequence_number async for event in stream] == [*range(len(events))]


async def test_a_stream_is_followed_while_the_response_grows():
    async with serving("Good day.") as api:
        api.engine.paused.set()
        made = await ask(api, background=True, stream=False)
        following = asyncio.create_task(api.client.get(f"/v1/responses/{made['id']}?stream=true"))
        await until(lambda: len(api.engine.added) == 1)
        api.engine.paused.clear()
        assert parse_events((await following).text)[-1]["type"] == "response.completed"


async def test_only_a_background_response_has_a_stream_to_take_up():
    async with serving("a") as api:
        made = await ask(api)
        answer = await api.client.get(f"/v1/responses/{made['id']}?stream=true")
        assert answer.status_code == 400 and "background" in answer.text


async def test_cancelling_aborts_the_request_and_stays_cancelled():
    async with serving("Good day.") as api:
        api.engine.paused.set()
        made = await ask(api, background=True)
        await until(lambda: len(api.engine.added) == 1)
        cancelled = await client_of(api).responses.cancel(made["id"])
        assert cancelled.status == "cancelled"
        await until(lambda: len(api.engine.aborted) == 1)
        for _ in range(2):
            assert (await client_of(api).responses.cancel(made["id"])).status == "cancelled"
        answer = await api.post("responses", input="a", previous_response_id=made["id"])
        assert answer.status_code == 400 and "cancelled" in answer.text


async def test_deleting_a_running_response_ends_it():
    async with serving("Good day.") as api:
        api.engine.paused.set()
        made = await ask(api, background=True)
        await until(lambda: len(api.engine.added) == 1)
        await client_of(api).responses.delete(made["id"])
        await until(lambda: len(api.engine.aborted) == 1)
        assert (await api.client.get(f"/v1/responses/{made['id']}")).status_code == 404


async def test_a_failure_in_the_background_is_found_in_the_response():
    async with serving("a") as api:
        api.engine.refusal = ErrorInfo.of(EngineError("r", "a kernel failed"))
        made = await ask(api, background=True)
        found = await ended(api, made["id"])
        assert (found["status"], found["error"]["code"]) == ("failed", "server_error")


@pytest.mark.parametrize("action", ["cancel", "delete"])
async def test_another_ingress_ends_a_response_that_it_does_not_run(action, monkeypatch):
    monkeypatch.setattr(lease_module, "RENEW_S", 0.01)
    with redis_server() as redis:
        config = StoreConfig(url=redis.url)
        async with serving("Good day.", store=config) as one, serving("a", store=config) as two:
            one.engine.paused.set()
            made = await ask(one, background=True)
            await until(lambda: len(one.engine.added) == 1)
            path = f"/v1/responses/{made['id']}"
            assert (await two.client.get(path)).json()["status"] == "queued" and not two.engine.added
            if action == "cancel":
                assert (await two.client.post(f"{path}/cancel")).json()["status"] == "cancelled"
            else:
                assert (await two.client.delete(path)).status_code == 200
            await until(lambda: len(one.engine.aborted) == 1)
            if action == "cancel":
                assert (await one.client.get(path)).json()["status"] == "cancelled"


@pytest.mark.parametrize("query", ["", "?stream=true", "?stream=true&starting_after=3"])
async def test_a_response_whose_ingress_has_ended_is_computed_by_the_one_that_is_asked_for_it(query):
    with redis_server() as redis:
        config = StoreConfig(url=redis.url)
        async with serving("Good day.", store=config) as one:
            earlier = await ask(one)
            one.engine.paused.set()
            made = await ask(one, background=True, previous_response_id=earlier["id"])
            await until(lambda: len(one.engine.added) == 2)
            await one.client.delete(f"/v1/responses/{earlier['id']}")
        async with serving("Good day.", store=config) as two:
            answer = await two.client.get(f"/v1/responses/{made['id']}{query}")
            assert answer.status_code == 200, answer.text
            found = await ended(two, made["id"])
            assert (found["status"], found["created_at"]) == ("completed", made["created_at"])
            assert found["output"][0]["content"][0]["text"] == "Good day."
            assert [request.prompt for request in two.engine.added] == [one.engine.added[1].prompt]
            if query:
                assert '"type":"response.completed"' in answer.text
                assert f'"sequence_number":{4 if "after" in query else 0},' in answer.text.split("\n\n")[0]
            again = await two.client.get(f"/v1/responses/{made['id']}{query}")
            assert not query or again.text == answer.text


async def test_a_response_that_another_ingress_computes_is_followed_and_computed_once():
    with redis_server() as redis:
        config = StoreConfig(url=redis.url)
        async with serving("Good day.", store=config) as one, serving("a", store=config) as two:
            one.engine.paused.set()
            made = await ask(one, background=True)
            await until(lambda: len(one.engine.added) == 1)
            path = f"/v1/responses/{made['id']}?stream=true"
            following = [asyncio.create_task(api.client.get(path)) for api in (one, two)]
            await asyncio.sleep(0)
            one.engine.paused.clear()
            texts = [(await task).text for task in following]
            assert all(parse_events(text)[-1]["type"] == "response.completed" for text in texts)
            assert not two.engine.added


async def test_a_response_whose_model_has_changed_meanwhile_has_failed_and_says_why():
    with redis_server() as redis:
        config = StoreConfig(url=redis.url)
        async with serving("Good day.", store=config, fingerprint="fp_1") as one:
            one.engine.paused.set()
            made = await ask(one, background=True)
            await until(lambda: len(one.engine.added) == 1)
        async with serving("a", store=config, fingerprint="fp_2") as two:
            found = await ended(two, made["id"])
            assert found["status"] == "failed" and "fp_2" in found["error"]["message"]
            assert not two.engine.added


async def test_nothing_runs_in_the_background_that_could_not_be_found():
    async with serving("a") as api:
        answer = await api.post("responses", input="a", background=True, store=False)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")
