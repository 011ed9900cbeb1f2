from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient

from cluster import ray_environment
from deployments.app import http_app
from deployments.frontend.api_keys import hash_key
from deployments.http.middleware import AuthConfig, around_serve
from deployments.http.server_header import SERVER_HEADER, SERVER_VARIABLE
from deployments.observability.telemetry import Telemetry
from deployments.options.console import ConsoleConfig
from deployments.parts.console import feed
from engine.errors import ConfigError
from tests.deployments.fake_api import fake_api, until
from tests.deployments.openai.bad_requests import BAD, Bad

JSON = {"Content-Type": "application/json"}
KEY = {"Authorization": "Bearer sk-a"}
# beside all that the OpenAPI document tells of
ROUTES = [
    ("GET", "/openapi.json"),
    ("POST", "/ping"),
    ("GET", "/nowhere"),
    ("DELETE", "/v1/models"),
    ("GET", "/health/"),
    ("GET", "/console/state"),
    ("GET", "/console/facts"),
]


@pytest.fixture
def auth(tmp_path: Path) -> AuthConfig:
    path = tmp_path / "keys"
    path.write_text(f"alice:{hash_key('sk-a')}\nbob:{hash_key('sk-b')}\n")
    return AuthConfig(api_keys_file=str(path))


async def test_every_route_but_health_and_the_page_wants_a_key(auth, monkeypatch):
    monkeypatch.setattr(feed, "STREAM_S", 0.1)
    async with fake_api(auth=auth) as api:
        await api.until_status()
        assert (await api.client.get("/health")).status_code == 200
        document = (await api.client.get("/openapi.json", headers=KEY)).json()
        routes = [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]
        routes.remove(("GET", "/health"))
        assert len(routes) > 10
        for method, path in routes + ROUTES:
            for headers in ({}, {"Authorization": "Bearer sk-x"}):
                response = await api.client.request(method, path, headers=headers)
                if path.startswith("/v1/messages"):
                    assert response.status_code == 401
                    assert response.json()["error"]["type"] == "authentication_error"
                else:
                    Bad(path, b"", status=401, method=method).check(response)
                    assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
            response = await api.client.request(method, path, headers=KEY)
            assert response.status_code != 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer sk-a"}, 200),
        ({"Authorization": "bearer  sk-a "}, 200),
        ({"X-Api-Key": "sk-a"}, 200),
        ({"Authorization": "Basic sk-x", "X-Api-Key": "sk-a"}, 200),
        ({"Authorization": "Bearer sk-x", "X-Api-Key": "sk-a"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "sk-a"}, 401),
        ({"Authorization": "Basic sk-a"}, 401),
        ({"X-Api-Key": "Bearer sk-a"}, 401),
    ],
)
async def test_key_comes_as_openais_clients_send_it_or_as_anthropics_do(auth, headers, status):
    async with fake_api(auth=auth) as api:
        assert (await api.client.get("/v1/models", headers=headers)).status_code == status


async def test_openapi_document_tells_of_every_route(auth, api):
    no_page = ConsoleConfig(enabled=False)  # its routes are no API
    app = http_app({"fake": api.model}, api.telemetry, console=no_page)
    routes = {route.path.replace(":path", "") for route in app.routes}
    assert routes == {*(await api.client.get("/openapi.json")).json()["paths"], "/openapi.json"}


async def test_bad_requests_are_refused_in_the_same_way_behind_a_key(auth):
    async with fake_api(auth=auth) as api:
        for bad in BAD:
            request = bad.request("http://fake")
            request.headers["Authorization"] = "Bearer sk-b"
            bad.check(await api.client.send(request))


async def test_keys_share_fairly_whatever_their_requests_say_of_users(auth):
    async with fake_api(auth=auth, max_num_seqs=1, max_waiting=6) as api:
        api.engine.paused.set()

        def ask(key: str, user: str) -> asyncio.Task[Any]:
            body, headers = {"prompt": "a", "user": user, "max_tokens": 1}, {"Authorization": f"Bearer {key}"}
            return asyncio.create_task(api.client.post("/v1/completions", json=body, headers=headers))

        flood = [ask("sk-a", str(i)) for i in range(20)]
        await until(lambda: api.model.admission.stats.refused == 12)
        late = [ask("sk-b", "one") for _ in range(3)]
        await until(lambda: api.model.admission.stats.refused == 15)
        api.engine.paused.clear()
        assert [(await response).status_code for response in late] == [200] * 3
        assert [(await response).status_code for response in flood].count(200) == 5


async def test_body_of_unknown_length_is_refused_as_soon_as_it_is_too_long():
    async with fake_api(auth=AuthConfig(max_body_bytes=10_000)) as api:
        sent = 0

        async def pieces() -> AsyncGenerator[bytes]:
            nonlocal sent
            yield b'{"prompt": "'
            for _ in range(1000):
                sent += 1000
                yield b"a" * 1000

        response = await api.client.post("/v1/completions", content=pieces(), headers=JSON)
        Bad("/v1/completions", b"", status=413).check(response)
        assert sent == 10_000


async def test_longest_body_is_accepted():
    async with fake_api(auth=AuthConfig(max_body_bytes=10_000)) as api:
        body = b'{"prompt": "a", "max_tokens": 1}'
        for length, status in ((10_000, 200), (10_001, 413)):
            response = await api.client.post("/v1/completions", content=body.ljust(length), headers=JSON)
            assert response.status_code == status


async def test_bad_file_of_keys_keeps_the_application_from_starting():
    with pytest.raises(ConfigError, match="api_keys_file"):
        http_app({}, Telemetry("ingress-1"), AuthConfig(api_keys_file="/none"))


async def test_body_that_never_ends_is_refused_after_a_deadline():
    async with fake_api(auth=AuthConfig(body_timeout_s=0.05)) as api:
        left = asyncio.Event()

        async def pieces() -> AsyncGenerator[bytes]:
            yield b'{"prompt": "'
            await left.wait()

        response = await api.client.post("/v1/completions", content=pieces(), headers=JSON)
        assert (response.status_code, response.json()["error"]["code"]) == (408, "body_timeout")
        assert response.headers["connection"] == "close"


def test_deadline_for_the_body_is_none_for_the_answer():
    async def scenario(timeout_s: float) -> int:
        async with fake_api(auth=AuthConfig(body_timeout_s=timeout_s)) as api:
            slow = api.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            api.engine.paused.set()
            asyncio.get_running_loop().call_later(2 * timeout_s, api.engine.paused.clear)
            return (await slow).status_code

    # a busy machine may take longer to read a body that is there
    assert any(asyncio.run(scenario(timeout_s)) == 200 for timeout_s in (0.1, 1.0, 10.0))


async def test_pages_of_other_origins_are_answered_only_if_the_configuration_names_them(auth):
    page = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}

    async def asked(*origins: str) -> tuple[int, str | None]:
        async with fake_api(auth=replace(auth, allowed_origins=origins)) as api:
            response = await api.client.options("/v1/completions", headers=page)
            return response.status_code, response.headers.get("access-control-allow-origin")

    assert await asked() == (401, None)
    assert await asked("https://a.example") == (200, "https://a.example")
    assert await asked("https://b.example") == (400, None)


@pytest.mark.parametrize("prefix", ["", "/llm", "/a/b"])
async def test_proxy_in_front_may_keep_its_prefix_or_take_it_off(auth, prefix):
    async with fake_api(auth=replace(auth, root_path="/llm")) as api:
        known = prefix in ("", "/llm")
        await api.until_status()
        assert ((await api.client.get(f"{prefix}/health")).status_code == 200) is known
        Bad("", b"", status=401).check(await api.client.get(f"{prefix}/v1/models"))
        response = await api.client.get(f"{prefix}/v1/models", headers={"Authorization": "Bearer sk-a"})
        assert response.status_code == (200 if known else 404)
        if known:
            document = (await api.client.get(f"{prefix}/openapi.json", headers={"Authorization": "Bearer sk-a"})).json()
            assert document["servers"] == [{"url": "/llm"}]


async def test_slash_at_the_end_is_no_redirect_and_no_model():
    async with fake_api(names=("one", "two")) as api:
        models = await api.client.get("/v1/models/")
        assert models.json() == (await api.client.get("/v1/models")).json()
        Bad("/health/", b"", status=404, method="GET").check(await api.client.get("/health/"))


@pytest.mark.parametrize("header", ["x-request-id", "x-session-id", "user-agent", "traceparent"])
async def test_header_that_is_no_text_is_refused_before_serve_would_decode_it(header, api):
    (around,) = around_serve()
    app = around.cls(http_app({"fake": api.model}, api.telemetry), *around.args, **around.kwargs)
    async with AsyncClient(transport=ASGITransport(app), base_url="http://fake") as client:
        for value in (b"\xff", b"a\xe9b", b"\xed\xa0\x80"):
            response = await client.get("/version", headers={header: value})
            Bad("/version", b"", header).check(response)
        for value in (b"abc", "é".encode()):
            assert (await client.get("/version", headers={header: value})).status_code == 200


async def test_request_that_was_sent_to_another_server_is_to_be_sent_again(monkeypatch):
    """The HAProxy of one that was killed may still have connections, and this one its ports."""
    monkeypatch.setenv(SERVER_VARIABLE, "ours")
    async with fake_api() as api:
        (around,) = around_serve()
        app = around.cls(http_app({"fake": api.model}, api.telemetry), *around.args, **around.kwargs)
        async with AsyncClient(transport=ASGITransport(app), base_url="http://fake") as client:
            response = await client.get("/version", headers={SERVER_HEADER: "another"})
            Bad("/version", b"", status=503).check(response)
            assert response.headers["retry-after"] == "1"
            for headers in ({SERVER_HEADER: "ours"}, {}):
                assert (await client.get("/version", headers=headers)).status_code == 200


def test_the_middleware_around_serve_is_found_under_the_name_that_serve_is_given():
    module, _, name = ray_environment.FRONT["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"].partition(":")
    assert getattr(import_module(module), name) is around_serve


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/files", "/v1/embeddings"])
@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "gzip, identity"])
async def test_a_compressed_body_is_a_415_that_says_which_would_be_read(path, encoding, api):
    body = gzip.compress(json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode())
    response = await api.client.post(path, content=body, headers={**JSON, "Content-Encoding": encoding})
    assert (response.status_code, response.headers["accept-encoding"]) == (415, "identity")
    message = f"Content-Encoding must be identity, got {encoding!r}"
    assert response.json()["error"]["message"] == message
    response = await api.post("completions", prompt="a", max_tokens=1)
    assert response.status_code == 200


async def test_a_body_that_says_it_is_not_compressed_is_read(api):
    headers = {**JSON, "Content-Encoding": "Identity"}
    response = await api.client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 200, response.text
