"""Clients that ask for more than fits, and one that floods, against a server as `make serve` starts it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import httpx
import pytest

from tests.serve.haproxy.clients import ALICE, BOB, FITS, MAX_NUM_SEQS
from tests.serve.idle import is_idle
from tests.serve.serve_run import wait_until

pytestmark = pytest.mark.serve

LIMITS = httpx.Limits(max_connections=1000)


@pytest.mark.slow
def test_ten_times_more_than_fits_is_answered_or_refused_at_once_and_nothing_else(server):
    body = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 100, "ignore_eos": True}
    loads = {"fits": MAX_NUM_SEQS, "ten times": 10 * FITS}
    slowest: dict[str, float] = {}

    async def ask(http: httpx.AsyncClient) -> tuple[httpx.Response, float]:
        started = time.monotonic()
        answer = await http.post(f"{server.url}/v1/completions", json=body, headers=ALICE)
        return answer, time.monotonic() - started

    async def scenario() -> None:
        async with httpx.AsyncClient(timeout=120, limits=LIMITS) as http:
            await ask(http)
            for name, count in loads.items():
                answers = await asyncio.gather(*(ask(http) for _ in range(count)))
                statuses = Counter(answer.status_code for answer, _ in answers)
                assert set(statuses) <= {200, 429}, statuses
                assert statuses[200] >= min(count, FITS)
                slowest[name] = max(took for answer, took in answers if answer.status_code == 200)
                for answer, _ in answers:
                    if answer.status_code == 429:
                        assert 1 <= int(answer.headers["retry-after"]) <= 60
                        assert answer.json()["error"]["code"] == "overloaded"
                    else:
                        assert answer.json()["usage"]["completion_tokens"] == 100

    asyncio.run(scenario())
    # a full queue is MAX_WAITING / MAX_NUM_SEQS more turns; the rest of the room is for refusing on the same cores
    assert slowest["ten times"] < 30 + 10 * slowest["fits"]
    wait_until(lambda: is_idle(server, ALICE))


def test_flood_of_one_key_leaves_room_for_another(server):
    body = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 20, "ignore_eos": True}

    async def scenario() -> None:
        async with httpx.AsyncClient(timeout=120, limits=LIMITS) as http:

            async def flood() -> None:
                while not done.is_set():
                    answer = await http.post(f"{server.url}/v1/completions", json=body, headers=ALICE)
                    statuses[answer.status_code] += 1

            done, statuses = asyncio.Event(), Counter[int]()
            floods = [asyncio.create_task(flood()) for _ in range(2 * FITS)]
            for _ in range(4):
                answer = await http.post(f"{server.url}/v1/completions", json=body, headers=BOB)
                assert answer.status_code == 200, answer.text
            done.set()
            await asyncio.gather(*floods)
            assert statuses[429] > 0
            assert set(statuses) == {200, 429}

    asyncio.run(scenario())
    wait_until(lambda: is_idle(server, ALICE))


def test_health_is_open_and_the_rest_is_not(server):
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    for path in ("/v1/models", "/metrics", "/version"):
        answer = httpx.get(f"{server.url}{path}", timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
