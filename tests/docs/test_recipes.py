"""Recipes of the pages run as they are written, over a fake engine: no model, and no Ray."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import ssl
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn
import yaml
from aiohttp import web
from fastapi import FastAPI

from deployments.billing.prices import Prices
from deployments.frontend.api_keys import key_line
from deployments.http.middleware import AuthConfig
from deployments.parts.adapters.sources import AdapterSources
from deployments.storage.config import StoreConfig
from engine.wire.parts.costs import SequenceCost
from tests.adapter_folders import write_adapter
from tests.deployments.fake_api import fake_api, says
from tests.docs.pages import block, page, run
from tools.site import ROOT

ADMIN = "sk-operator"
AUTH = AuthConfig(
    api_keys=(key_line("operator", ADMIN),),
    admin_keys=("operator",),
    allow_runtime_key_updating=True,
    allow_runtime_lora_updating=True,
)


@asynccontextmanager
async def listening(app: FastAPI) -> AsyncGenerator[str]:
    """Serve an application whose lifespan runs already, and yield its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def aiohttp_server(app: web.Application, tls: ssl.SSLContext | None = None) -> AsyncGenerator[str]:
    """Serve an application of aiohttp, and yield its port."""
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        yield str(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def calls(page: str, with_: str, url: str) -> list[str]:
    """The commands of a page's block that call a server, for the one at this URL."""
    text = block(page, "bash", with_=with_).replace("\\\n", " ").replace("http://127.0.0.1:8000", url)
    return [line for line in text.splitlines() if line.startswith("curl")]


async def call(command: str, folder: Path, **variables: str) -> str:
    return await asyncio.to_thread(run, command, folder, **variables)


async def test_a_key_is_made_with_limits_used_and_billed(tmp_path):
    (application,) = yaml.safe_load(block("docs/quotas.md", "yaml", with_="admin_keys"))["applications"]
    prices = application["args"]["models"][0]["prices"]
    store = StoreConfig(url=f"sqlite://{tmp_path}/store")
    async with fake_api(says("hello"), auth=AUTH, store=store, prices=Prices(**prices)) as api:
        await api.until_status()
        api.engine.cost = SequenceCost(6.0, 0.0, 0.0)
        async with listening(api.app) as url:
            generate, ask, info, bill = calls("docs/quotas.md", "key/info", url)
            made = json.loads(await call(generate, tmp_path, ADMIN_KEY=ADMIN))
            answer = json.loads(await call(ask, tmp_path, KEY=made["key"]))
            assert answer["usage"]["cost"] == 6.0 * prices["engine_hour"] / 3600
            told = json.loads(await call(info, tmp_path, KEY=made["key"]))
            shown = [json.loads(line) for line in block("docs/quotas.md", "json", with_="reset_at").splitlines()]
            for known, use in zip(told["used"].values(), shown[1]["used"].values(), strict=True):
                assert list(known) == list(use)
                known |= {name: use[name] for name in ("used", "reset_at")}  # figures of the moment
            assert [made | {"key": shown[0]["key"]}, told] == shown
            counted = await call(bill, tmp_path, ADMIN_KEY=ADMIN)
            assert "manta_key_cost_total" in counted and 'key="operator"' not in counted


async def test_a_session_with_a_budget_shows_what_it_has_used(tmp_path):
    async with fake_api(says("hello")) as api, listening(api.app) as url:
        ask, look = calls("docs/sessions.md", "v1/sessions", url)
        usage = json.loads(await call(ask, tmp_path))["usage"]
        told = json.loads(await call(look, tmp_path))
        assert (told["max_tokens"], told["remaining_tokens"]) == (200_000, 200_000 - usage["total_tokens"])
        assert told["usage"]["turns"] == len(told["turns"]) == 1


async def test_an_adapter_is_added_replaced_and_unloaded(tmp_path):
    for number, name in enumerate(("sql", "sql-2")):
        write_adapter(tmp_path / name, seed=number)
    async with fake_api(of={"adapters": AdapterSources(max_rank=16)}, auth=AUTH) as api, listening(api.app) as url:
        add, replace, unload = (
            command.replace("/adapters/", f"{tmp_path}/") for command in calls("docs/lora.md", "unload", url)
        )
        shown = re.findall(r"^# (Success.*)$", block("docs/lora.md", "bash", with_="unload"), re.MULTILINE)
        assert [await call(add, tmp_path, ADMIN_KEY=ADMIN)] == shown
        assert "has already been loaded" in await call(add, tmp_path, ADMIN_KEY=ADMIN)
        for command in (replace, unload):
            assert (await call(command, tmp_path, ADMIN_KEY=ADMIN)).startswith("Success")
        assert len({lora.digest for lora in api.engine.loaded}) == 2


async def test_openais_client_gets_one_answer_for_a_key(tmp_path):
    async with fake_api(says("hello"), names=("default",)) as api, listening(api.app) as url:
        program = block("docs/idempotency.md", "python", with_="answer.id").replace("http://127.0.0.1:8000", url)
        (tmp_path / "program.py").write_text(program.replace("str(uuid.uuid4())", "'one'"))
        first, again = [await call(f"{sys.executable} program.py", tmp_path) for _ in range(2)]
        assert first == again and first.strip().endswith(" hello")
        assert len(api.engine.added) == 1


async def test_openais_client_asks_again_with_the_same_key_until_somebody_answers(tmp_path):
    keys = []

    async def answer(request: web.Request) -> web.Response:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) < 3:
            assert request.transport is not None
            request.transport.close()
        choice = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
        body = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return web.json_response(body)

    program = block("docs/idempotency.md", "python", with_="answer.id").replace("max_retries=5", "max_retries=0")
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with aiohttp_server(app) as port:
        (tmp_path / "program.py").write_text(program.replace("8000", port).replace("sleep(1)", "sleep(0)"))
        shown = await call(f"{sys.executable} program.py", tmp_path)
    assert shown.strip() == "c hello" and len(keys) == 3 and len({*keys}) == 1


async def test_openais_client_shows_a_stream_once_that_broke_and_that_ended_with_an_error(tmp_path):
    keys, whole = [], ["An ", "ocean ", "is ", "salt."]

    def event(text: str) -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
        return f"data: {json.dumps(chunk)}\n\n".encode()

    async def answer(request: web.Request) -> web.StreamResponse:
        keys.append(request.headers["Idempotency-Key"])
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for text in whole[: {1: 3, 2: 2}.get(len(keys))]:
            await stream.write(event(text))
        if len(keys) == 1:
            assert request.transport is not None
            request.transport.close()
        else:
            end = b'{"error": {"message": "the engine ended"}}' if len(keys) == 2 else b"[DONE]"
            await stream.write(b"data: " + end + b"\n\n")
        return stream

    program = block("docs/idempotency.md", "python", with_="stream=True")
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with aiohttp_server(app) as port:
        (tmp_path / "program.py").write_text(program.replace("8000", port).replace("sleep(1)", "sleep(0)"))
        shown = await call(f"{sys.executable} program.py", tmp_path)
    assert shown == "".join(whole) and len(keys) == 3 and len({*keys}) == 1


def test_the_command_for_slow_requests_finds_the_line_of_the_log_that_the_page_shows(tmp_path):
    if shutil.which("jq") is None:
        pytest.skip("no jq")
    sample = json.loads(block("docs/observability.md", "json", with_="request ended").replace("\n", ""))
    command = block("docs/debugging.md", "bash", with_="jq").replace("/tmp/ray/session_latest/logs/", "")
    moment = "2026-11-24T14:03:00.000+00:00"
    slow, fast = ({**sample, "time": moment, "first_token_s": seconds} for seconds in (3.0, 0.1))
    other = {**slow, "message": "request sent"}
    later = {**slow, "time": "2026-11-24T14:05:00.000+00:00"}
    of_none = {"message": "ready", "time": moment}
    lines = ["no JSON", *map(json.dumps, (slow, fast, other, later, of_none))]
    (tmp_path / "worker-1.err").write_text("\n".join(lines))
    assert [json.loads(line) for line in run(command, tmp_path).splitlines()] == [slow]
    (of_request,) = re.findall(r"`(select\(.request_id[^`]*)`", page("docs/debugging.md").read_text())
    for name in ("a1", "cmpl-a1"):  # an X-Request-Id, and the `id` of its answer
        script = f"cat worker-1.err | jq -Rc 'fromjson? | {of_request.replace('ID', name)}'"
        assert [json.loads(line) for line in run(script, tmp_path).splitlines()] == [slow, fast, other, later]


async def test_mantas_own_clients_trust_the_certificate_that_the_page_makes(tmp_path):
    make, check, _, explain, *_ = [
        line
        for with_ in ("openssl req", "SSL_CERT_FILE")
        for line in block("docs/security.md", "bash", with_=with_).splitlines()
    ]
    await call(make, tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"path": request.path})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with aiohttp_server(app, tls) as port:
        check = check.replace("8000", port) + f" --resolve llm.example.com:{port}:127.0.0.1"
        explain = explain.replace("llm.example.com:8000", f"localhost:{port}") + " --json"
        assert json.loads(await call(check, tmp_path)) == {"path": "/health"}
        untrusted = await call(check.replace("--cacert server.pem", "-s -w %{exitcode}") + " || true", tmp_path)
        assert untrusted == "60", "the certificate is not trusted by itself"
        trusting = {"SSL_CERT_FILE": str(tmp_path / "server.pem"), "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "sk"}
        assert json.loads(await call(explain, tmp_path, **trusting)) == {"path": "/debug/requests/ID"}
