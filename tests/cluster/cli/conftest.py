from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from aiohttp import web


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, tuple[int, bytes]]]]:
    """Its URL, and its answers by path: status and body."""
    answers: dict[str, tuple[int, bytes]] = {}

    async def answer(request: web.Request) -> web.Response:
        status, body = answers[request.raw_path]
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
