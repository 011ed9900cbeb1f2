"""Every route, without a key, with a wrong one, with another's and with an admin's: what it answers and changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from deployments.app import http_app
from deployments.frontend.api_keys import key_line
from deployments.http.middleware import AuthConfig
from deployments.http.route import ADMIN, KEY, OPEN, OWNER, Route
from deployments.observability.telemetry import Telemetry
from deployments.parts.adapters.files import open_served
from deployments.parts.adapters.sources import AdapterSources
from deployments.parts.console import feed
from deployments.served_adapter import ServedAdapter
from tests.adapter_folders import write_adapter
from tests.deployments.fake_api import FakeApi, fake_api

NAMES = ("alice", "mallory", "boss")
ALICE, MALLORY, BOSS = ({"authorization": f"Bearer sk-{name}"} for name in NAMES)
NOBODY: dict[str, str] = {}
WRONG = {"authorization": "Bearer sk-wrong"}
AUTH = AuthConfig(
    api_keys=tuple(key_line(name, f"sk-{name}") for name in NAMES),
    admin_keys=("boss",),
    allow_runtime_key_updating=True,
    allow_runtime_lora_updating=True,
)
APP = http_app({}, Telemetry("ingress"), AUTH)
ROUTES: list[Route] = APP.state.routes
STREAMS = "/console/state"  # never ends within the time of a test client


def of(route: Route) -> str:
    return f"{route.method} {route.path}"


@dataclass
class Server:
    api: FakeApi
    adapter: ServedAdapter

    async def send(self, route: str, headers: dict[str, str], body: Any = None) -> httpx.Response:
        method, path = route.split()
        path = path.replace("{name}", "x").replace("{name:path}", "x")
        return await self.api.client.request(method, path, headers=headers, json=body)

    async def complete(self, headers: dict[str, str], name: str) -> None:
        body = {"model": "fake", "prompt": "a", "max_tokens": 1}
        answer = await self.api.client.post("/v1/completions", json=body, headers={**headers, "x-request-id": name})
        assert answer.status_code == 200, answer.text

    async def state(self) -> list[Any]:
        """All that routes of admins may change."""
        models = await self.send("GET /v1/models", BOSS)
        keys = await self.send("GET /key/list", BOSS)
        limits = await self.api.client.get("/key/info", params={"key_alias": "bob"}, headers=BOSS)
        return [
            self.api.engine.resets,
            [card["id"] for card in models.json()["data"]],
            keys.json()["keys"],
            limits.json()["limits"],
        ]


@asynccontextmanager
async def serving(folder: Path) -> AsyncGenerator[Server]:
    adapter = open_served("own", str(write_adapter(folder / "own")), "fake", 16)
    sources = AdapterSources(modules=(adapter,), dynamic_folder=None, max_rank=16)
    async with fake_api(auth=AUTH, of={"adapters": sources}) as api:
        await api.until_status()
        yield Server(api, adapter)


def test_the_application_has_the_declared_routes_and_no_others():
    assert all(isinstance(route, APIRoute) for route in APP.routes)
    served = {f"{method} {route.path}" for route in APP.routes for method in route.methods}  # type: ignore[attr-defined]
    heads = {f"HEAD {route.path}" for route in ROUTES if route.method == "GET"}
    assert served == {of(route) for route in ROUTES} | heads


def test_a_route_without_an_audience_cannot_be_built():
    with pytest.raises(TypeError):
        Route("GET", "/", APP.state.routes[0].handler)  # type: ignore[arg-type, call-arg]


async def test_only_open_routes_answer_without_a_key_whatever_the_method(tmp_path):
    async with serving(tmp_path) as server:
        for route in ROUTES:
            methods = {route.method, "HEAD" if route.method == "GET" else "OPTIONS", "OPTIONS", "PUT", "PATCH"}
            for method in methods:
                for headers in (NOBODY, WRONG):
                    answer = await server.send(f"{method} {route.path}", headers)
                    assert (answer.status_code == 401) == (route.audience is not OPEN), (method, route.path)


async def test_routes_of_admins_refuse_every_other_key_and_the_rest_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(feed, "STREAM_S", 0.01)
    async with serving(tmp_path) as server:
        for route in ROUTES:
            method = "HEAD" if route.method == "GET" else route.method
            for sent in {route.method, method}:
                answer = await server.send(f"{sent} {route.path}", MALLORY)
                assert (answer.status_code == 403) == (route.audience is ADMIN), of(route)
                if route.audience is ADMIN and sent != "HEAD":
                    assert "ingress.admin_keys" in answer.json()["error"]["message"]
                assert (await server.send(f"{sent} {route.path}", BOSS)).status_code not in (401, 403), of(route)


# what each route of admins is sent, to change something
BOB = {"key_alias": "bob"}
CHANGES: dict[str, Callable[[Server], Any]] = {
    "POST /key/generate": lambda _: BOB | {"rpm_limit": 1000},
    "POST /key/update": lambda _: BOB | {"rpm_limit": 1},
    "POST /key/delete": lambda _: {"key_aliases": ["bob"]},
    "POST /reset_prefix_cache": lambda _: None,
    "POST /v1/load_lora_adapter": lambda server: {"lora_name": "new", "lora_path": server.adapter.path},
    "POST /v1/unload_lora_adapter": lambda _: {"lora_name": "new"},
}


def test_each_route_of_admins_that_changes_something_is_tried():
    assert {of(route) for route in ROUTES if route.audience is ADMIN and route.method != "GET"} == CHANGES.keys()


async def test_only_an_admin_changes_what_all_keys_have(tmp_path):
    async with serving(tmp_path) as server:
        for route, body in CHANGES.items():
            before = await server.state()
            for headers in (NOBODY, WRONG, ALICE):
                assert (await server.send(route, headers, body(server))).status_code in (401, 403)
            assert await server.state() == before, route
            answer = await server.send(route, BOSS, body(server))
            assert answer.status_code == 200, answer.text
            async with asyncio.timeout(60):
                while await server.state() == before:  # an engine is told, and does it later
                    await asyncio.sleep(0.005)


async def test_no_answer_to_a_key_tells_of_another_key_or_its_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(feed, "STREAM_S", 0.01)
    async with serving(tmp_path) as server:
        await server.complete(ALICE, "secret-id")
        told = {}
        for headers in (MALLORY, BOSS):
            texts = [
                (await server.send(of(route), headers)).text
                for route in ROUTES
                if route.method == "GET" and route.audience in (KEY, OWNER)
            ]
            texts += [(await server.api.client.get("/debug/requests/secret-id", headers=headers)).text]
            told[headers["authorization"]] = [text for text in texts if "alice" in text or "cmpl-secret-id" in text]
        mallorys, boss = told.values()
        assert not mallorys
        assert len(boss) == 4, "the metrics of all and of one node, the console's state, and the timeline"
        own = await server.api.client.get("/debug/requests/secret-id", headers=ALICE)
        assert own.json()["sequences"][0]["key"] == "alice"


@pytest.mark.parametrize("with_keys", [False, True])
async def test_without_admins_nobody_is_one_unless_there_are_no_keys(with_keys, caplog):
    auth = replace(AUTH, admin_keys=(), allow_runtime_key_updating=False)
    auth = auth if with_keys else AuthConfig()
    async with fake_api(auth=auth) as api:
        await api.until_status()
        status = (await api.client.post("/reset_prefix_cache", headers=ALICE if with_keys else NOBODY)).status_code
        assert status == (403 if with_keys else 200)
    said = [record.message for record in caplog.records if "ingress.admin_keys" in record.message]
    assert len(said) == with_keys


async def test_a_hundred_scrapes_at_once_ask_once_and_render_once(tmp_path, monkeypatch):
    async with serving(tmp_path) as server:
        asked = 0
        all_stats = server.api.telemetry.all_stats

        async def counted() -> Any:
            nonlocal asked
            asked += 1
            return await all_stats()

        monkeypatch.setattr(server.api.telemetry, "all_stats", counted)
        answers: list[Awaitable[httpx.Response]] = [server.send("GET /metrics", BOSS) for _ in range(100)]
        texts = {answer.text for answer in await asyncio.gather(*answers)}
        assert (len(texts), asked) == (1, 1)
        await server.send("GET /metrics", BOSS)
        assert asked == 2
