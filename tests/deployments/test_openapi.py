"""Whatever the OpenAPI document allows, and what it does not, is never answered with a 5xx."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings

from deployments.app import http_app
from deployments.openai.batches.config import BatchConfig
from tests.deployments.fake_api import fake_api, says
from tests.examples import examples

if TYPE_CHECKING:  # takes two seconds, which only the process that runs these tests spends
    import schemathesis


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the API over HTTP in a thread, and return its URL."""
    started, stop = threading.Event(), threading.Event()
    port, folder = 0, tmp_path_factory.mktemp("batches")

    async def serve() -> None:
        nonlocal port
        async with fake_api(says("ok")) as api:
            app = http_app({"fake": api.model}, api.telemetry, batches=BatchConfig(folder=str(folder)))
            server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            started.set()
            await asyncio.to_thread(stop.wait)
            server.should_exit = True
            await serving

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(60)
    yield f"http://127.0.0.1:{port}"
    stop.set()
    thread.join()


@pytest.fixture(scope="module")
def document(url: str) -> schemathesis.BaseSchema:
    import schemathesis

    return schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_is_answered_with_a_5xx_or_against_the_document(document, mode):
    """Without schemathesis' own pytest plugin, which pytest 9.2 breaks."""
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as openapi

    checks = [
        not_a_server_error,
        openapi.content_type_conformance,
        openapi.response_schema_conformance,
        openapi.status_code_conformance,
        openapi.unsupported_method,
    ]

    @given(case=document.as_strategy(generation_mode=GenerationMode(mode)))
    @settings(max_examples=examples(250), suppress_health_check=list(HealthCheck))
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=checks)

    check()


def test_head_is_answered_like_get_without_the_body(url):
    """Also where the body would never end."""
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    for path in [path.replace("{name}", "nothing") for path, methods in paths.items() if "get" in methods]:
        get, head = httpx.get(url + path), httpx.head(url + path)
        assert (head.status_code, head.headers.get("content-type")) == (
            get.status_code,
            get.headers.get("content-type"),
        )
        assert head.content == b"" and (
            path.startswith("/metrics") or head.headers["content-length"] == str(len(get.content))
        )
    for path in ("/console/state", "/", "/v1/models/fake"):
        head = httpx.head(url + path, timeout=20)
        assert (head.status_code, head.content) == (200, b"")
    assert httpx.head(f"{url}/v1/chat/completions").status_code == 405
