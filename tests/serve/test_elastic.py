"""A replica of engines that share experts: it goes on without those that are killed or hang.

`pytest -s` shows what the streams' pauses were.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Event
from typing import Any

import httpx
import numpy as np
import pytest

from tests.models import make_model
from tests.serve.serve_run import wait_until
from tests.serve.test_pipeline_stages import LONG, MODEL, served
from tests.serve.test_rank_groups import CONTEXT, POOL, Replica, Serving, body, lives, text

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(900)]

STREAMS = 32
WENT_ON = re.compile(r"engine goes on generation=(\d+) engines=(\d+) experts_read=(\d+) pause_s=([\d.]+)")
ALONE = {"data_parallel_size": 1, "enable_expert_parallel": False, "enable_elastic_ep": False}
PREFILL = {
    "prefill": {"num_cpus": 0.25, "label_selector": POOL, "engine": ALONE},
    "handoff": {"transport": "tcp", "policy": "always"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "four engines": {"data_parallel_size": 4},
    "engines of two ranks": {"data_parallel_size": 2, "tensor_parallel_size": 2},
    "prompts elsewhere": {"data_parallel_size": 4, "pools": PREFILL},
}
Blows = dict[int, int]
"""Signals to ranks, all at once."""
# one after the other: all ranks have met at the store of rank 0, and would meet next at that of rank 1
BLOWS: dict[str, list[Blows]] = {
    "four engines": [{0: signal.SIGKILL, 1: signal.SIGSTOP}, {3: signal.SIGSTOP}],
    "engines of two ranks": [{1: signal.SIGKILL}],
    "prompts elsewhere": [{1: signal.SIGKILL}],
}


@dataclass
class Stream:
    """What one client sees."""

    parts: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: object = None

    def run(self, url: str, started: Event) -> None:
        ask = {**body(MODEL, "The", LONG), "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=ask, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    event = json.loads(line.removeprefix("data: "))
                    self.error = self.error or event.get("error")
                    self.parts += [choice["text"] for choice in event.get("choices", [])]
                    self.times.append(time.monotonic())
                    started.set()

    def pause_s(self, since: float) -> float:
        """The longest time between two events that ended after a moment."""
        return max((b - a for a, b in pairwise(self.times) if b > since), default=0.0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_that_dies_or_hangs_under_32_streams_changes_no_text_and_the_others_go_on(tmp_path, name):
    layout, folder = (
        LAYOUTS[name],
        make_model(tmp_path / "model", "qwen3_moe", tokenizer=True, max_position_embeddings=CONTEXT),
    )
    options = {"device": "cpu", "dtype": "float32", "determinism": "strict"}
    elastic = {"enable_expert_parallel": True, "enable_elastic_ep": True, **layout}
    with served(tmp_path, folder, 4, nodes=1, **options, **elastic) as serving:
        (replica,) = serving.replicas(MODEL)
        left = layout["data_parallel_size"]
        for blows in BLOWS[name]:
            left -= len(blows)
            strike(serving, replica, blows, left, layout.get("tensor_parallel_size", 1))
        if "pools" in layout:
            received = values(serving, 'manta_handoffs_total{.*result="received"')
            assert sum(received) >= STREAMS
        if name == "engines of two ranks":
            check_restart(serving, replica)


def strike(serving: Serving, replica: Replica, blows: Blows, left: int, ranks: int) -> None:
    """Strike ranks of different engines under 32 streams. left: engines that go on, with so many ranks each."""
    expected = text(serving.ask(MODEL, max_tokens=LONG, timeout_s=120))
    with ThreadPoolExecutor(STREAMS) as pool:
        started, streams = [Event() for _ in range(STREAMS)], [Stream() for _ in range(STREAMS)]
        url = serving.server.url
        running = [pool.submit(stream.run, url, event) for stream, event in zip(streams, started, strict=True)]
        assert all(event.wait(120) for event in started)
        assert not any(call.done() for call in running)
        struck_at = time.monotonic()
        for rank, blow in blows.items():
            os.kill(replica.ranks[rank].pid, blow)
        for call in running:
            call.result(timeout=300)
    assert [stream.error for stream in streams] == [None] * STREAMS
    assert {"".join(stream.parts) for stream in streams} == {expected}
    assert lives(replica.pid), "the replica goes on"
    wait_until(lambda: not any(lives(replica.ranks[rank].pid) for rank in blows))
    assert values(serving, "manta_shared_engines") == [left] * left
    assert max(values(serving, 'manta_engine_seconds_total{.*spent_on="recovery"')) > 0
    pauses = [stream.pause_s(struck_at) for stream in streams]
    own = [match.groups() for line in serving.server.log if (match := WENT_ON.search(line)) and int(match[2]) == left]
    print(f"\n{blows}: pauses P50 {np.median(pauses):.2f} s, most {max(pauses):.2f} s; engines: {own}", flush=True)
    assert len(own) == left * ranks and sum(int(read) for _, _, read, _ in own) > 0


def check_restart(serving: Serving, replica: Replica) -> None:
    """A replica that has lost engines restarts with all of them once it is idle."""
    wait_until(lambda: not lives(replica.pid), timeout_s=180)
    serving.wait_for_all(timeout_s=180)
    wait_until(lambda: serving.ask(MODEL).status_code == 200)


def values(serving: Serving, name: str) -> list[float]:
    """Values of a metric. name: regular expression of its name and labels."""
    lines = httpx.get(f"{serving.server.url}/metrics", timeout=30).text.splitlines()
    return [float(line.split()[-1]) for line in lines if re.match(name, line)]
