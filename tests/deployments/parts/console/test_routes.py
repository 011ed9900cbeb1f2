from __future__ import annotations

import re

import msgspec
import pytest
from httpx import ASGITransport, AsyncClient
from starlette.requests import Request

from cluster.config.app_config import AppConfig
from deployments.app import http_app
from deployments.frontend import sequence_metrics
from deployments.frontend.api_keys import hash_key
from deployments.http.context import IS_ADMIN
from deployments.http.middleware import AuthConfig
from deployments.options.console import ConsoleConfig
from deployments.parts.console.cluster_watcher import ClusterState
from deployments.parts.console.routes import PAGE
from engine.errors import without_credentials
from tests.deployments.fake_api import fake_api, says

KEY = {"Authorization": "Bearer sk-a"}


async def test_every_file_of_the_page_forbids_whatever_is_not_of_this_server(api):
    for path in ("/", *(f"/console/page/{file.name}" for file in PAGE.iterdir() if file.name != "index.html")):
        response = await api.client.get(path)
        assert response.status_code == 200, path
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        again = await api.client.get(path, headers={"If-None-Match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_no_file_of_the_page_names_another_host_or_makes_markup_of_text():
    for file in PAGE.iterdir():
        text = file.read_text(encoding="utf-8")
        hosts = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}  # a namespace
        assert not hosts, file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), file.name


async def test_a_browser_gets_the_page_without_a_key_and_nothing_else():
    auth = AuthConfig(api_keys=(f"alice:{hash_key('sk-a')}",))
    async with fake_api(auth=auth) as api:
        for path in ("/", "/console/page/app.js"):
            assert (await api.client.get(path)).status_code == 200
        for path in ("/console/state", "/console/facts", "/console/page/../state", "/debug/requests/x"):
            assert (await api.client.get(path)).status_code == 401
        assert (await api.client.get("/console/facts", headers=KEY)).status_code == 200


async def test_the_page_is_found_where_a_proxy_calls_no_prefix_a_slash(api):
    app = http_app({"fake": api.model}, api.telemetry)
    transport = ASGITransport(app, root_path="/")
    async with AsyncClient(transport=transport, base_url="http://fake") as client:
        assert (await client.get("/")).status_code == 200


async def test_an_operator_can_leave_the_console_out(api):
    app = http_app({"fake": api.model}, api.telemetry, console=ConsoleConfig(enabled=False))
    async with AsyncClient(transport=ASGITransport(app), base_url="http://fake") as client:
        for path in ("/", "/console/page/app.js", "/console/state", "/console/facts"):
            assert (await client.get(path)).status_code == 404


async def test_the_state_has_replicas_and_requests_but_no_text_of_them():
    async with fake_api(says("a secret answer")) as api:
        await api.until_status()
        await api.post("completions", prompt="a secret prompt", max_tokens=3)
        app = http_app({"fake": api.model}, api.telemetry)
        of_an_admin = Request({"type": "http", "state": {IS_ADMIN: True}})
        feed = next(route for route in app.routes if getattr(route, "path", "") == "/console/state")
        stream = (await feed.endpoint(of_an_admin)).body_iterator  # type: ignore[attr-defined]
        event = await anext(stream)
        await stream.aclose()
        state = msgspec.json.decode(event.removeprefix(b"data: "), type=ClusterState)
        assert [replica.engine_id for replica in state.models[0].decode] == ["fake"]
        assert [request.output_tokens for request in state.requests] == [3]
        assert "secret" not in event.decode()


@pytest.mark.parametrize("keeps_texts", [False, True])
async def test_an_opened_request_has_prompt_and_output_only_if_the_operator_wants_that(keeps_texts, monkeypatch):
    monkeypatch.setattr(sequence_metrics, "MAX_TEXT_TOKENS", 4)
    prompt = "a prompt of several tokens"
    async with fake_api(says("an answer"), keeps_texts=keeps_texts) as api:
        await api.until_status()
        answer = await api.post("completions", prompt=prompt, max_tokens=3)
        timeline = await api.client.get(f"/debug/requests/{answer.json()['id']}")
        (found,) = timeline.json()["sequences"]
        (listed,) = api.telemetry.own_overview().requests
        assert (listed.prompt, listed.output) == (None, None)
        if not keeps_texts:
            assert (found["prompt"], found["output"]) == (None, None)
            return
        assert found["prompt"] == api.model.tokenizer.decode(api.model.tokenizer.encode(prompt)[:4])
        assert found["prompt"] != prompt
        assert found["output"] == answer.json()["choices"][0]["text"] != ""


def test_an_operator_who_wants_texts_gets_them():
    args = {"models": [{"name": "m", "model": "pocket"}], "ingress": {"console_texts": True}}
    assert AppConfig.parse(args).console_config().texts
    assert not ConsoleConfig().texts


def test_the_configuration_is_shown_with_its_defaults_and_without_its_secrets():
    config = AppConfig.parse(
        {
            "models": [{"name": "m", "model": "pocket", "decode": {"engine": {"max_num_seqs": 7}}, "prefill": {}}],
            "ingress": {"api_keys": [f"alice:{hash_key('sk-a')}"], "store": "redis://me:pass@host:6379/0"},
        }
    ).console_config()
    shown = config.configuration
    assert shown["models"][0]["decode"]["engine"]["max_num_seqs"] == 7
    assert shown["models"][0]["prefill"]["engine"]["max_num_seqs"] == 128
    assert shown["ingress"]["max_replays"] == 3
    assert shown["ingress"]["api_keys"] == "1 keys"
    assert shown["ingress"]["store"] == "redis://***@host:6379/0"
    assert "alice" not in str(shown)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:p@ss@host:6379/0", "redis://***@host:6379/0"),
        ("redis://host:6379/0?db=1&password=s%40cret&x=2", "redis://host:6379/0?db=1&password=***&x=2"),
        ("unix://me:pass@/tmp/redis.sock", "unix://***@/tmp/redis.sock"),
        ("https://host/path@revision", "https://host/path@revision"),
    ],
)
def test_no_part_of_a_password_is_shown(url, shown):
    assert without_credentials({"urls": [url]}) == {"urls": [shown]}
