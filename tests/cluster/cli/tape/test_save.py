"""`manta tape save` against a server of the API."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from aiohttp import web
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.cli.tape.fetch import fetch
from engine.core.tape.file import pack_tapes, read_tapes
from engine.errors import EngineUnavailable, InvalidApiKey, NotPermitted, RequestError


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, tuple[int, bytes]]]]:
    """Its URL, and its answers by path: status and body."""
    answers: dict[str, tuple[int, bytes]] = {}

    async def answer(request: web.Request) -> web.Response:
        status, body = answers[request.path]
        return web.Response(status=status, body=body)

    async def start() -> tuple[web.AppRunner, str]:
        application = web.Application()
        application.add_routes([web.get("/{path:.*}", answer)])
        runner = web.AppRunner(application, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner, url = asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield url, answers
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_the_tapes_of_a_server_are_written_to_a_file(server, tmp_path):
    url, answers = server
    answers["/debug/tape"] = 200, pack_tapes([])
    result = CliRunner().invoke(app, ["tape", "save", str(tmp_path / "a.tape"), "--url", url])
    assert result.exit_code == 0, result.exception
    assert read_tapes(tmp_path / "a.tape") == []
    assert CliRunner().invoke(app, ["replay", str(tmp_path / "a.tape")]).exit_code != 0, "there is nothing to replay"


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (401, b'{"error": {"message": "who are you?"}}', InvalidApiKey, "who are you?"),
        (403, b'{"error": {"message": "only keys of ingress.admin_keys"}}', NotPermitted, "admin_keys"),
        (404, b'{"detail": "Not Found"}', RequestError, "is not a Manta server"),
        (503, b"", EngineUnavailable, "answers 503"),
    ],
)
def test_what_a_server_answers_in_place_of_a_tape_is_one_clear_error(server, status, body, error, message):
    url, answers = server
    answers["/debug/tape"] = status, body
    with pytest.raises(error, match=message):
        fetch(url, None)
