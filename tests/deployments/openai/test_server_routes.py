from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployments.http.debug import VERSION
from tests.deployments.fake_api import fake_api, until


async def test_request_is_served_by_the_model_it_names():
    async with fake_api(names=("one", "two/b")) as api:
        for name in ("one", "two/b"):
            response = (await api.post("completions", prompt="a", model=name, max_tokens=1)).json()
            assert response["model"] == name
        assert [m["id"] for m in (await api.client.get("/v1/models")).json()["data"]] == ["one", "two/b"]
        card = (await api.client.get("/v1/models/two/b")).json()
        assert (card["id"], card["object"], card["max_model_len"]) == ("two/b", "model", 512)
        assert card["input_modalities"] == ["text"]


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}])
async def test_request_that_names_no_model_is_served_where_there_is_only_one(model):
    async with fake_api() as api:
        assert (await api.post("completions", prompt="a", max_tokens=1, **model)).json()["model"] == "fake"
    async with fake_api(names=("one", "two")) as api:
        response = await api.post("completions", prompt="a", **model)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
        assert "one, two" in response.json()["error"]["message"]


async def test_models_do_not_take_each_others_places_in_the_queue():
    async with fake_api(names=("one", "two"), max_num_seqs=1, max_waiting=1) as api:
        api.engine.paused.set()

        def ask(model: str) -> asyncio.Task[Any]:
            return asyncio.create_task(api.post("completions", prompt="a", model=model, max_tokens=1))

        responses = [ask("one") for _ in range(3)]
        responses += [ask("two") for _ in range(3)]
        await asyncio.sleep(0)
        refused = await ask("one")
        assert refused.status_code == 429
        api.engine.paused.clear()
        assert [(await response).status_code for response in responses] == [200] * 6


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_fails_while_the_engine_makes_no_progress(path, api):
    await api.until_status()
    for method in ("GET", "HEAD"):
        response = await api.client.request(method, path)
        assert (response.status_code, response.content) == (200, b"")
    api.engine.step_age_s = 60.0
    async with asyncio.timeout(60):
        while (response := await api.client.get(path)).status_code == 200:
            await asyncio.sleep(0.005)
    assert response.status_code == 503
    assert "no step ended for 60 s" in response.json()["error"]["message"]
    assert response.headers["retry-after"] == "1"
    api.engine.step_age_s = 0.0
    async with asyncio.timeout(60):
        while (await api.client.get(path)).status_code == 503:
            await asyncio.sleep(0.005)


async def test_reset_of_the_prefix_cache_reaches_the_engine_and_says_so_if_there_is_none(api):
    await api.until_status()
    response = await api.client.post("/reset_prefix_cache")
    assert (response.status_code, response.content) == (200, b"")
    await until(lambda: api.engine.resets == 1)
    api.replica.fail("rank 0 died")
    assert (await api.client.post("/reset_prefix_cache")).status_code == 503


async def test_model_answers_to_its_aliases_under_its_name():
    async with fake_api(aliases=("gpt-4o", "best")) as api:
        cards = (await api.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["fake", "gpt-4o", "best"]
        assert (await api.client.get("/v1/models/best")).json()["id"] == "best"
        response = await api.post("completions", model="gpt-4o", prompt="a", max_tokens=1)
        assert response.json()["model"] == "fake"
        unknown = (await api.post("completions", model="other", prompt="a")).json()["error"]
        assert "fake, gpt-4o, best" in unknown["message"]


async def test_version_and_load(api):
    assert (await api.client.get("/version")).json() == {"version": VERSION}
    assert (await api.client.get("/load")).json() == {"server_load": 0}


async def test_id_of_an_answer_is_made_of_the_requests_id(api):
    ask = {"prompt": "a", "max_tokens": 1}
    headers = {"X-Request-Id": "abc"}
    response = await api.client.post("/v1/completions", json=ask, headers=headers)
    assert response.json()["id"] == "cmpl-abc"
    response = await api.client.post("/v1/completions", json={**ask, "request_id": "xyz"}, headers=headers)
    assert response.json()["id"] == "cmpl-xyz"


async def test_bug_of_ours_is_a_500_that_tells_nothing_of_the_inside(monkeypatch, caplog, api):

    def fail(*_: Any) -> None:
        raise KeyError("/secret/path")

    monkeypatch.setattr(api.model.admission, "check", fail)
    response = await api.post("completions", prompt="a")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert "/secret/path" in caplog.text
