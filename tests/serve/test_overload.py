"""Clients that leave, and clients that ask for more than fits, against a real `serve run`."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from deployments.api_keys import hash_key
from tests.serve.serve_run import ServeRun, haproxy_ports, wait_until
from tests.serve.test_openai_client import metric

pytestmark = pytest.mark.serve

MAX_NUM_SEQS, MAX_WAITING = 8, 8
FITS = MAX_NUM_SEQS + MAX_NUM_SEQS // 8 + MAX_WAITING
KEYS = {name: {"Authorization": f"Bearer sk-{name}"} for name in ("alice", "bob")}
LIMITS = httpx.Limits(max_connections=1000)


@pytest.fixture(scope="module")
def small(tmp_path_factory, model_folder) -> Iterator[ServeRun]:
    """A server that is soon full, and wants keys; as `make serve` starts it."""
    folder = tmp_path_factory.mktemp("small")
    keys = folder / "keys"
    keys.write_text("".join(f"{name}:{hash_key(f'sk-{name}')}\n" for name in KEYS))
    model = {"name": "tiny", "model": str(model_folder), "engine": {"max_num_seqs": MAX_NUM_SEQS}}
    args = {"models": [model], "ingress": {"max_waiting": MAX_WAITING, "api_keys_file": str(keys)}}
    server = ServeRun(folder, args, environment=haproxy_ports(), manta=True)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


def is_idle(server: ServeRun, headers: dict[str, str] | None = None) -> bool:
    """Whether nothing runs, waits or holds blocks any more."""
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    busy = sum(metric(server, name, headers=headers) for name in names)
    busy += metric(server, "manta_kv_blocks{", 'state="used"', headers=headers)
    load = httpx.get(f"{server.url}/load", headers=headers, timeout=10).json()["server_load"]
    return busy == load == 0


@pytest.mark.parametrize("stream", [True, False])
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
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "The", "max_tokens": 2}, timeout=5)
    assert answer.status_code == 200
    wait_until(lambda: is_idle(server))


def test_ten_times_more_than_fits_is_answered_or_refused_at_once_and_nothing_else(small):
    body = {"prompt": "The quick brown fox", "max_tokens": 100, "ignore_eos": True}
    loads = {"fits": MAX_NUM_SEQS, "ten times": 10 * FITS}
    slowest: dict[str, float] = {}

    async def ask(http: httpx.AsyncClient) -> tuple[httpx.Response, float]:
        started = time.monotonic()
        answer = await http.post(f"{small.url}/v1/completions", json=body, headers=KEYS["alice"])
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
    wait_until(lambda: is_idle(small, KEYS["alice"]))


def test_flood_of_one_key_leaves_room_for_another(small):
    body = {"prompt": "The quick brown fox", "max_tokens": 50, "ignore_eos": True}

    async def scenario() -> None:
        async with httpx.AsyncClient(timeout=120, limits=LIMITS) as http:

            async def flood() -> None:
                while not done.is_set():
                    answer = await http.post(f"{small.url}/v1/completions", json=body, headers=KEYS["alice"])
                    statuses[answer.status_code] += 1

            done, statuses = asyncio.Event(), Counter[int]()
            floods = [asyncio.create_task(flood()) for _ in range(3 * FITS)]
            for _ in range(10):
                answer = await http.post(f"{small.url}/v1/completions", json=body, headers=KEYS["bob"])
                assert answer.status_code == 200, answer.text
            done.set()
            await asyncio.gather(*floods)
            assert statuses[429] > 0
            assert set(statuses) == {200, 429}

    asyncio.run(scenario())
    wait_until(lambda: is_idle(small, KEYS["alice"]))


def test_health_is_open_and_the_rest_is_not(small):
    assert httpx.get(f"{small.url}/health", timeout=10).status_code == 200
    for path in ("/v1/models", "/metrics", "/version"):
        answer = httpx.get(f"{small.url}{path}", timeout=10)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
