"""The two decode replicas of one model: prompts that begin alike meet in one, and when one is killed, its streams go on
in the other. With more replicas, longer texts and other deaths: replicas/."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import httpx
import pytest

from tests.scrape import Scrape
from tests.serve.plain.conftest import REPLICAS
from tests.serve.replicas.test_replay import engine_under, explained, stream
from tests.serve.serve_run import ServeRun, wait_until

pytestmark = pytest.mark.serve

LONG = {"max_tokens": 200, "ignore_eos": True}
OF_A_FORM = {"temperature": 0, "max_tokens": 300, "structured_outputs": {"regex": "[a-z]{2,9}( [a-z]{2,9}){30}"}}
ASKED: list[dict[str, Any]] = [
    *({"prompt": f"{i} quick foxes", "temperature": 0, **LONG} for i in range(4)),
    *({"prompt": f"{i} lazy dogs", "temperature": 1, "seed": i, **LONG} for i in range(3)),
    {"prompt": "The", **OF_A_FORM},
]


def scrape(server: ServeRun) -> Scrape:
    return Scrape(httpx.get(f"{server.url}/metrics", timeout=60).text)


def test_prompts_that_begin_alike_meet_in_one_replica_and_others_spread(server):
    def complete(prompt: list[int]) -> int:
        """Return how many tokens of the prompt were cached."""
        body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    def by_engine() -> dict[str, float]:
        return {one.labels["engine"]: one.value for one in scrape(server).select("vllm:prompt_tokens_total", [])}

    before = by_engine()
    prefixes = [[20 + number, *(40 + (number * 7 + i) % 50 for i in range(59))] for number in range(24)]
    for prefix in prefixes:
        assert complete(prefix) == 0
    for prefix in prefixes:
        assert complete([*prefix, 7, 8, 9]) == 60
    after = by_engine()
    used = [engine for engine in after if after[engine] > before.get(engine, 0)]
    assert len(used) == REPLICAS, "what has nothing in common goes anywhere; to one alone once in eight million runs"


def test_streams_go_on_unchanged_when_a_decode_replica_is_killed(server):
    with ThreadPoolExecutor(len(ASKED)) as pool:
        expected = list(pool.map(lambda body: stream(server, body)[:2], ASKED))
        assert len({text for text, _ in expected}) == len(ASKED)
        before = scrape(server).sum("manta_request_replays_total")
        running = Barrier(len(ASKED) + 1)
        named = {f"killed-{number}": body for number, body in enumerate(ASKED)}
        streams = [pool.submit(stream, server, {**body, "request_id": name}, running) for name, body in named.items()]
        running.wait(60)
        server.process_of(engine_under(server, next(iter(named))), rank=0).kill()
        assert [one.result(timeout=120)[:2] for one in streams] == expected
    replays = scrape(server).sum("manta_request_replays_total") - before
    assert replays == sum(explained(server, name)["replays"] for name in named) > 0
    wait_until(lambda: scrape(server).sum("manta_up") == REPLICAS, timeout_s=120)
