"""A decode replica is killed under 16 running streams, in bfloat16: all of them end as if nothing had happened.

`pytest -s` shows how long the streams paused.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import httpx
import psutil
import pytest

from tests.scrape import Scrape
from tests.serve.serve_run import ServeRun, wait_until

pytestmark = [pytest.mark.serve, pytest.mark.slow]

WORDS = ["ocean", "lamp", "winter", "dog", "music", "river", "stone", "letter", "hand", "bread", "window", "king"]
WORDS += ["road", "paper", "horse", "island"]
LONG = {"max_tokens": 300, "ignore_eos": True}
GREEDY = {"temperature": 0, **LONG}
SAMPLED = {"temperature": 1.0, "presence_penalty": 0.5, **LONG}
OF_A_FORM = {"temperature": 0, "max_tokens": 400, "structured_outputs": {"regex": "[a-z]{2,9}( [a-z]{2,9}){60}"}}
ASKED: list[dict[str, Any]] = [
    *({"prompt": f"The {word} is", **GREEDY} for word in WORDS[:8]),
    *({"prompt": f"The {word} is", "seed": seed, **SAMPLED} for seed, word in enumerate(WORDS[8:15])),
    {"prompt": f"The {WORDS[15]} is", **OF_A_FORM},
]


def scrape(server: ServeRun) -> Scrape:
    answer = httpx.get(f"{server.url}/metrics", timeout=60)
    assert answer.status_code == 200
    return Scrape(answer.text)


def stream(server: ServeRun, body: dict[str, Any], running: Barrier | None = None) -> tuple[str, str, float]:
    """The text, why it ended, and the longest pause between two events. running: met after the first event."""
    text, reason, pause_s, last_at = "", "", 0.0, time.monotonic()
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=90) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            choice = event["choices"][0]
            text, reason = text + choice["text"], choice["finish_reason"]
            if running is not None:
                running.wait(60)
                running = None
                last_at = time.monotonic()
            pause_s, last_at = max(pause_s, time.monotonic() - last_at), time.monotonic()
    return text, reason, pause_s


def explained(server: ServeRun, name: str) -> dict[str, Any]:
    (timeline,) = httpx.get(f"{server.url}/debug/requests/{name}", timeout=60).json()["sequences"]
    return dict(timeline)


def processes(server: ServeRun, title: str) -> list[psutil.Process]:
    return [p for p in server.processes() if p.cmdline() and p.cmdline()[0].startswith(title)]


def engine_under(server: ServeRun, name: str) -> str:
    """The engine in which a sequence runs."""
    return str(explained(server, name)["engines"][-1])


@pytest.mark.parametrize(("rank", "turn"), [(None, 1), *((0, i) for i in range(1, 11))], ids=str)
def test_streams_go_on_unchanged_when_a_process_of_a_decode_replica_is_killed(server, rank, turn):
    """rank: None for the control actor."""
    with ThreadPoolExecutor(len(ASKED)) as pool:
        expected = list(pool.map(lambda body: stream(server, body)[:2], ASKED))
        assert len({text for text, _ in expected}) == len(ASKED)
        before = scrape(server).sum("manta_request_replays_total")
        running = Barrier(len(ASKED) + 1)
        named = {f"{rank}-{turn}-{number}": body for number, body in enumerate(ASKED)}
        streams = [pool.submit(stream, server, {**body, "request_id": name}, running) for name, body in named.items()]
        running.wait(60)
        server.process_of(engine_under(server, next(iter(named))), rank).kill()
        found = [one.result(timeout=120) for one in streams]
    differ = sum(one[:2] != unharmed for one, unharmed in zip(found, expected, strict=True))
    assert differ == 0, f"{differ} of {len(expected)} texts differ"
    replayed = scrape(server).sum("manta_request_replays_total") - before
    assert replayed > 0
    timelines = [explained(server, name) for name in named]
    assert sum(timeline["replays"] for timeline in timelines) == replayed
    for timeline in timelines:
        lines = [event["what"] for event in timeline["events"]]
        assert sum("another follows: engine_unavailable" in line for line in lines) == timeline["replays"]
        assert len(timeline["engines"]) == 1 + timeline["replays"]
    assert scrape(server).sum("vllm:request_success_total", finished_reason="error") == 0
    pauses = ", ".join(f"{pause_s:.2f}" for _, _, pause_s in found)
    victim = "a control actor" if rank is None else "a rank"
    print(f"\nSIGKILL of {victim}: {len(found)} texts unchanged, {replayed:.0f} replays, pauses in s: {pauses}")


def test_requests_whose_clients_leave_are_not_replayed(server):
    before = scrape(server).sum("manta_request_replays_total")
    left = scrape(server).sum("vllm:request_success_total", finished_reason="abort")
    for body in ASKED:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=30
        ) as response:
            next(response.iter_lines())
    aborted = left + len(ASKED)
    wait_until(lambda: scrape(server).sum("vllm:request_success_total", finished_reason="abort") == aborted)
    wait_until(lambda: scrape(server).sum("vllm:num_requests_running") == 0)
    assert scrape(server).sum("manta_request_replays_total") == before
