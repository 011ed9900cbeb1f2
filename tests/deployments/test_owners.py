"""All that a server stores for one API key, tried by another key: by every route, and by way of batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.frontend.api_keys import hash_key
from deployments.http.middleware import AuthConfig
from deployments.openai.batches.config import BatchConfig
from tests.deployments.fake_api import FakeApi, fake_api
from tests.deployments.openai.batches.batches import answers, client_of, ended, jsonl, start
from tests.deployments.openai.responses.serving import prompt, serving
from tests.products import each_once

SECRET = "the owner's secret"
KEYS = AuthConfig(api_keys=tuple(f"{name}:{hash_key(name)}" for name in ("owner", "other")))
CHAT = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5}


@dataclass(frozen=True, slots=True)
class Stored:
    """Names of what belongs to `owner`."""

    file: str
    batch: str
    output: str
    response: str
    item: str
    background: str
    of_a_batch: str
    stream: str
    event: str
    session: str


async def send(api: FakeApi, key: str, method: str, path: str, headers: Any = None, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}", **(headers or {})}
    return await api.client.request(method, path, headers=headers, **({"json": body} if body else {}))


def responses_line(custom_id: str = "a", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/responses", "body": {"input": SECRET, **body}}


async def by_batch(api: FakeApi, key: str, **body: Any) -> dict[str, Any]:
    """The answer to one line with a request for a response."""
    client = client_of(api, key)
    batch = await ended(client, (await start(client, jsonl(responses_line(**body)), "/v1/responses")).id)
    (answer,) = await answers(client, batch.output_file_id or batch.error_file_id)
    return dict(answer["response"])


async def store(api: FakeApi) -> Stored:
    client = client_of(api, "owner")
    batch = await start(client, jsonl(responses_line()), "/v1/responses")
    batch = await ended(client, batch.id)
    (answer,) = await answers(client, batch.output_file_id)
    made = (await send(api, "owner", "POST", "/v1/responses", input=SECRET)).json()
    background = (await send(api, "owner", "POST", "/v1/responses", input=SECRET, background=True)).json()
    headers = {"Idempotency-Key": "key"}
    stream = await send(api, "owner", "POST", "/v1/chat/completions", headers, **CHAT, stream=True)
    named = await send(api, "owner", "POST", "/v1/chat/completions", {"X-Session-Id": "owned"}, **CHAT)
    assert named.status_code == 200
    event = stream.text.split("\n", 1)[0].removeprefix("id: ")
    return Stored(
        file=batch.input_file_id,
        batch=batch.id,
        output=str(batch.output_file_id),
        response=made["id"],
        item=made["output"][0]["id"],
        background=background["id"],
        of_a_batch=answer["response"]["body"]["id"],
        stream=event.partition(":")[0],
        event=event,
        session="owned",
    )


@asynccontextmanager
async def world(folder: Path) -> AsyncGenerator[tuple[FakeApi, Stored]]:
    async with serving("Good day.", auth=KEYS, batches=BatchConfig(folder=str(folder))) as api:
        yield api, await store(api)


# every route that takes the name of something stored
BY_PATH = {
    "GET /v1/files/{name}": ("file", "output"),
    "GET /v1/files/{name}/content": ("file", "output"),
    "DELETE /v1/files/{name}": ("file", "output"),
    "GET /v1/batches/{name}": ("batch",),
    "POST /v1/batches/{name}/cancel": ("batch",),
    "GET /v1/responses/{name}": ("response", "background", "of_a_batch"),
    "GET /v1/responses/{name}/input_items": ("response", "background", "of_a_batch"),
    "POST /v1/responses/{name}/cancel": ("response", "background", "of_a_batch"),
    "DELETE /v1/responses/{name}": ("response", "background", "of_a_batch"),
    "GET /v1/streams/{name}": ("stream",),
    "GET /v1/sessions/{name}": ("session",),
    "DELETE /v1/sessions/{name}": ("session",),
}
# the second has times, and no text; the third ends nothing of another key (test_hold_requests.py); the
# fourth has decisions, and no text
NOT_STORED = ("/v1/models/{name}", "/debug/requests/{name}", "/v1/holds/{name}", "/debug/tapes/{name}")
LISTS = ("/v1/files", "/v1/batches", "/v1/sessions")
# every way in which a request for a response, over HTTP or as a line of a batch, names something stored
REFERENCES = {
    "previous_response_id": lambda stored, name: {"previous_response_id": getattr(stored, name)},
    "item_reference": lambda stored, _: {"input": [{"type": "item_reference", "id": stored.item}]},
}


def test_the_table_has_every_route_that_takes_a_name():
    async def scenario() -> None:
        async with fake_api() as api:
            paths.update((await api.client.get("/openapi.json")).json()["paths"])

    paths: dict[str, Any] = {}
    asyncio.run(scenario())
    named = {f"{method.upper()} {path}" for path, item in paths.items() if "{" in path for method in item}
    assert {route for route in named if route.partition(" ")[2] not in NOT_STORED} == BY_PATH.keys()


async def test_no_route_lets_another_key_see_or_change_what_is_stored(tmp_path):
    async with world(tmp_path) as (api, stored):
        for route, names in BY_PATH.items():
            method, path = route.split()
            for name in names:
                answer = await send(api, "other", method, path.format(name=getattr(stored, name)))
                assert (answer.status_code, SECRET in answer.text) == (404, False), (route, name)
        for path in LISTS:
            assert (await send(api, "other", "GET", path)).json()["data"] == []
        resumed = await send(api, "other", "GET", f"/v1/streams/{stored.stream}", {"Last-Event-ID": stored.event})
        assert resumed.status_code == 404
        answer = await send(
            api, "other", "POST", "/v1/chat/completions", {"Last-Event-ID": stored.event}, **CHAT, stream=True
        )
        assert answer.status_code == 404
        num_added = len(api.engine.added)
        headers = {"Idempotency-Key": "key"}
        answer = await send(api, "other", "POST", "/v1/chat/completions", headers, **CHAT, stream=True)
        assert stored.stream not in answer.text and len(api.engine.added) == num_added + 1
        answer = await send(
            api, "other", "POST", "/v1/batches", input_file_id=stored.file, endpoint="/v1/responses",
            completion_window="24h",
        )  # fmt: skip
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "input_file_id")


@pytest.mark.parametrize(("reference", "name"), each_once(REFERENCES, ["response", "of_a_batch", "background"]))
async def test_a_conversation_of_one_key_is_in_no_prompt_of_another_by_http_or_by_batch(tmp_path, reference, name):
    async with world(tmp_path) as (api, stored):
        fields = REFERENCES[reference](stored, name)
        body = {"input": "and?", **fields}
        num_added = len(api.engine.added)
        answer = await send(api, "other", "POST", "/v1/responses", **body)
        line = await by_batch(api, "other", **body)
        assert (answer.status_code, line["status_code"]) == (404, 404)
        assert SECRET not in answer.text + json.dumps(line) and len(api.engine.added) == num_added
        await until_completed(api, stored.background)
        for _ in range(2):  # its owner may
            answer = await send(api, "owner", "POST", "/v1/responses", **body)
            assert answer.status_code == 200 and "Good day." in prompt(api)
        line = await by_batch(api, "owner", **body)
        assert line["status_code"] == 200 and "Good day." in prompt(api)


async def until_completed(api: FakeApi, name: str) -> None:
    while (await send(api, "owner", "GET", f"/v1/responses/{name}")).json()["status"] != "completed":
        await asyncio.sleep(0.005)


async def test_the_response_of_a_batch_line_is_its_owners_to_read_and_to_delete(tmp_path):
    async with world(tmp_path) as (api, stored):
        path = f"/v1/responses/{stored.of_a_batch}"
        assert (await send(api, "owner", "GET", path)).json()["output"][0]["content"][0]["text"] == "Good day."
        assert SECRET in (await send(api, "owner", "GET", f"{path}/input_items")).text
        assert (await send(api, "owner", "DELETE", path)).json()["deleted"]


async def test_a_line_of_a_batch_cannot_run_in_the_background(tmp_path):
    async with world(tmp_path) as (api, _):
        num_added = len(api.engine.added)
        line = await by_batch(api, "owner", background=True)
        assert (line["status_code"], line["body"]["error"]["param"]) == (400, "background")
        assert len(api.engine.added) == num_added
