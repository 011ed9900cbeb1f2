"""Requests find the replica that has their prefix, or their session."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.scrape import Scrape
from tests.serve.replicas.conftest import REPLICAS
from tests.serve.serve_run import ServeRun, wait_until

pytestmark = [pytest.mark.serve, pytest.mark.slow]

READY = re.compile(r"ServeReplica:manta:decode-pocket pid=(\d+)\).* (decode-pocket-\w+) .*replica ready")


def scrape(server: ServeRun) -> Scrape:
    answer = httpx.get(f"{server.url}/metrics", timeout=60)
    assert answer.status_code == 200
    return Scrape(answer.text)


def complete(server: ServeRun, prompt: list[int], session: str = "", **body: Any) -> int:
    """Tokens of the prompt that were cached."""
    headers = {"x-session-id": session} if session else {}
    request = {"model": "pocket", "prompt": prompt, "max_tokens": 2, "ignore_eos": True, **body}
    answer = httpx.post(f"{server.url}/v1/completions", json=request, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == body.get("n", 1)
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def by_engine(server: ServeRun) -> dict[str, float]:
    """Prompt tokens so far."""
    series = scrape(server).select("vllm:prompt_tokens_total", [])
    return {one.labels["engine"]: one.value for one in series}


def prefix(number: int) -> list[int]:
    return [20 + number, *(40 + (number * 7 + i) % 50 for i in range(59))]


def test_prompts_that_begin_alike_meet_in_one_replica_and_others_spread(server):
    before = by_engine(server)
    for number in range(40):  # one replica in three is left out by chance once in ten million times
        assert complete(server, prefix(number)) == 0
    for number in range(40):
        assert complete(server, [*prefix(number), 7, 8, 9]) == 60
    after = by_engine(server)
    used = [engine for engine in after if after[engine] > before[engine]]
    assert len(used) == REPLICAS, "what has nothing in common with others goes anywhere"


def test_the_router_knows_what_engines_have(server):
    """What is expected to be cached is cached."""
    names = ("manta_routing_cached_tokens_total", "manta_routing_drift_tokens_total", "manta_routed_requests_total")
    reason = {"reason": "longest_prefix", "policy": "prefix_aware"}

    def counts() -> list[float]:
        now = scrape(server)
        return [now.sum(name, **(reason if "requests" in name else {})) for name in names]

    for _ in range(2):
        complete(server, prefix(20))  # from now on there is a series for each reason
    before = counts()
    for number in range(21, 27):
        complete(server, prefix(number))
        complete(server, [*prefix(number), 7])
    cached, drift, routed = (now - then for now, then in zip(counts(), before, strict=True))
    assert cached > 0 and routed > 0
    assert drift == 0


def test_many_at_once_with_one_prefix_are_shared_out(server):
    before = by_engine(server)
    with ThreadPoolExecutor(60) as threads:
        calls = [threads.submit(complete, server, [*prefix(30), 5, i], max_tokens=60) for i in range(60)]
        for call in calls:
            call.result()
    after = by_engine(server)
    assert sum(after[engine] > before[engine] for engine in after) > 1


def test_all_sequences_of_one_http_request_find_a_replica(server):
    complete(server, prefix(40), n=7)


def test_a_session_stays_with_one_replica_and_goes_on_elsewhere_when_that_dies(server):
    def replica_of(session: str, number: int) -> str:
        before = by_engine(server)
        complete(server, prefix(number), session)
        after = by_engine(server)
        (engine,) = [engine for engine in after if after[engine] > before.get(engine, 0)]
        return engine

    homes = {replica_of("s", number) for number in range(50, 56)}
    assert len(homes) == 1, "their prompts have nothing in common"
    home = homes.pop()
    pids = {engine: int(pid) for line in server.log for pid, engine in READY.findall(line)}
    for process in [*psutil.Process(pids[home]).children(recursive=True), psutil.Process(pids[home])]:
        process.kill()
    for number in range(56, 62):
        complete(server, prefix(number), "s")
    assert home not in by_engine(server)
    wait_until(lambda: scrape(server).sum("manta_up") == REPLICAS, timeout_s=120)
    complete(server, prefix(70), "s")
