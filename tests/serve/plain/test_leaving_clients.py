"""Clients that leave before they have their answers, against a real `serve run`."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.serve.idle import is_idle
from tests.serve.serve_run import wait_until

pytestmark = pytest.mark.serve

LIMITS = httpx.Limits(max_connections=1000)


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_200_clients_that_leave_after_half_a_second_leave_nothing_behind(server, stream):
    body = {"prompt": "The", "max_tokens": 500, "ignore_eos": True, "stream": stream}

    async def leave(http: httpx.AsyncClient) -> None:
        try:
            async with asyncio.timeout(0.5):
                await http.post(f"{server.url}/v1/completions", json=body)
        except TimeoutError:
            pass

    async def scenario() -> None:
        async with httpx.AsyncClient(timeout=60, limits=LIMITS) as http:
            await asyncio.gather(*(leave(http) for _ in range(200)))

    asyncio.run(scenario())
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "The", "max_tokens": 2}, timeout=60)
    assert answer.status_code == 200
    wait_until(lambda: is_idle(server))
