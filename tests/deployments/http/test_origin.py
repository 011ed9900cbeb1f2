"""What a browser sends for a page of somebody else, and under a foreign name."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from deployments.frontend.api_keys import key_line
from deployments.http.middleware import AuthConfig
from tests.deployments.fake_api import FakeApi, fake_api

LOCAL = AuthConfig(is_on_loopback=True, allowed_hosts=("llm.example", "Box"))
OWN_HOSTS = [
    "localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000",
    "localhost.:8000",
    "llm.example", "LLM.example:443", "box:8000",
]  # fmt: skip
FOREIGN_HOSTS = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example:8000", "127.0.0.2",
    "0.0.0.0",
    "[::]", "::1", "localhost@evil.example", "evil.example@localhost", "localhost/evil", "localhost:x", "[::1", "",
    "evil\\localhost", "localhost,evil.example", "2130706433", "10.0.0.1:8000",
]  # fmt: skip


async def get(api: FakeApi, host: str, path: str = "/v1/models") -> httpx.Response:
    return await api.client.get(path, headers={"host": host})


async def test_a_server_for_this_machine_without_keys_answers_to_its_own_names_only():
    async with fake_api(auth=LOCAL) as api:
        for host in OWN_HOSTS:
            assert (await get(api, host)).status_code == 200, host
        for host in FOREIGN_HOSTS:
            for path in ("/v1/models", "/", "/metrics", "/nowhere"):
                answer = await get(api, host, path)
                assert answer.status_code == 403, host
                message = answer.json()["error"]["message"]
                assert repr(host) in message and "ingress.allowed_hosts" in message and "\n" not in message
        two = await api.client.get("/v1/models", headers=[("host", "localhost"), ("host", "evil.example")])
        assert two.status_code == 403


@pytest.mark.parametrize(
    "auth",
    [
        replace(LOCAL, is_on_loopback=False),
        replace(LOCAL, api_keys=(key_line("alice", "sk-alice"),)),
        replace(LOCAL, allowed_hosts=("*",)),
    ],
    ids=["others reach it", "keys", "all names"],
)
async def test_other_servers_are_called_by_any_name(auth):
    async with fake_api(auth=auth) as api:
        answer = await api.client.get("/v1/models", headers={"host": "any.example", "authorization": "Bearer sk-alice"})
        assert answer.status_code == 200


OWN_ORIGINS = ["http://fake", "https://fake", "http://fake:80", "https://a.example"]
FOREIGN_ORIGINS = [
    "null", "", "http://fake:8000", "http://fake.evil.example", "https://b.example", "http://a.example", "file://",
    "chrome-extension://abc", "http://fake@evil.example", "http://[", "fake", "//fake", "http://fake/", "http://FAKE.x",
]  # fmt: skip


async def test_pages_of_other_origins_change_nothing_with_any_method():
    async with fake_api(auth=AuthConfig(allowed_origins=("https://a.example",))) as api:
        await api.until_status()
        for origin in FOREIGN_ORIGINS:
            for method in ("POST", "PUT", "PATCH", "DELETE"):
                answer = await api.client.request(method, "/reset_prefix_cache", headers={"origin": origin})
                assert answer.status_code == 403, origin
                message = answer.json()["error"]["message"]
                assert repr(origin) in message and "ingress.allowed_origins" in message and "\n" not in message
            assert (await api.client.get("/v1/models", headers={"origin": origin})).status_code == 200
        assert api.engine.resets == 0
        for origin in OWN_ORIGINS:
            assert (await api.client.post("/reset_prefix_cache", headers={"origin": origin})).status_code == 200, origin
        assert (await api.client.post("/reset_prefix_cache")).status_code == 200, "no browser"
    async with fake_api(auth=AuthConfig(allowed_origins=("*",))) as api:
        await api.until_status()
        for origin in FOREIGN_ORIGINS:
            assert (await api.client.post("/reset_prefix_cache", headers={"origin": origin})).status_code == 200


async def test_a_page_whose_port_is_the_one_by_which_it_was_loaded_is_the_servers_own():
    async with fake_api(auth=LOCAL) as api:
        for host, origin, status in (
            ("localhost:8000", "http://localhost:8000", 200),
            ("[::1]:8000", "http://[::1]:8000", 200),
            ("localhost:8000", "http://localhost:9000", 403),
            ("localhost:8000", "http://127.0.0.1:8000", 403),
            ("llm.example", "https://llm.example", 200),
        ):
            body = {"prompt": "a", "max_tokens": 1}
            answer = await api.client.post("/v1/completions", json=body, headers={"host": host, "origin": origin})
            assert answer.status_code == status, (host, origin)


async def test_an_error_before_a_route_has_the_shape_of_its_api():
    async with fake_api(auth=LOCAL) as api:
        answer = await api.client.post("/v1/messages", json={}, headers={"host": "localhost", "origin": "null"})
        assert answer.json()["error"]["type"] == "permission_error"
