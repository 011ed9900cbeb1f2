"""A replica of four engines that share experts: it goes on without those that are killed.

`pytest -s` shows what the streams' pauses were.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Event

import httpx
import numpy as np
import pytest

from tests.models import make_model
from tests.serve.serve_run import wait_until
from tests.serve.test_pipeline_stages import LONG, MODEL, served
from tests.serve.test_rank_groups import CONTEXT, Replica, Serving, body, lives, text

pytestmark = [pytest.mark.serve, pytest.mark.slow]

ENGINES, STREAMS = 4, 32
WENT_ON = re.compile(r"engine goes on generation=(\d+) engines=(\d+) experts_read=(\d+) pause_s=([\d.]+)")


@pytest.fixture(scope="module")
def serving(tmp_path_factory) -> Iterator[Serving]:
    folder = make_model(tmp_path_factory.mktemp("model"), "qwen3_moe", tokenizer=True, max_position_embeddings=CONTEXT)
    options = {"device": "cpu", "dtype": "float32", "determinism": "strict"}
    elastic = {"data_parallel": ENGINES, "expert_parallel": True, "enable_elastic_ep": True}
    with served(tmp_path_factory.mktemp("serve"), folder, ENGINES, nodes=1, **options, **elastic) as serving:
        yield serving


@pytest.fixture(scope="module")
def replica(serving) -> Replica:
    """The replica as it started."""
    (found,) = serving.replicas(MODEL)
    return found


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


@pytest.mark.parametrize(("killed", "left"), [(2, 3), (0, 2)])  # rank 0 has the store at which the engines met first
def test_an_engine_killed_under_32_streams_changes_no_text_and_the_others_go_on(serving, replica, killed, left):
    expected = text(serving.ask(MODEL, max_tokens=LONG, timeout_s=120))
    with ThreadPoolExecutor(STREAMS) as pool:
        started, streams = [Event() for _ in range(STREAMS)], [Stream() for _ in range(STREAMS)]
        url = serving.server.url
        running = [pool.submit(stream.run, url, event) for stream, event in zip(streams, started, strict=True)]
        assert all(event.wait(120) for event in started)
        assert not any(call.done() for call in running)
        killed_at = time.monotonic()
        os.kill(replica.ranks[killed].pid, signal.SIGKILL)
        for call in running:
            call.result(timeout=300)
    assert [stream.error for stream in streams] == [None] * STREAMS
    assert {"".join(stream.parts) for stream in streams} == {expected}
    assert lives(replica.pid), "the replica goes on"
    metrics = httpx.get(f"{url}/metrics", timeout=30).text
    alive = [float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("manta_shared_engines{")]
    assert alive == [left] * left
    pauses = [stream.pause_s(killed_at) for stream in streams]
    own = [match.groups() for line in serving.server.log if (match := WENT_ON.search(line)) and int(match[2]) == left]
    print(f"\npauses of {STREAMS} streams: P50 {np.median(pauses):.2f} s, most {max(pauses):.2f} s; engines: {own}")
    assert len(own) == left and sum(int(read) for _, _, read, _ in own) > 0


def test_a_replica_that_has_lost_engines_restarts_with_all_of_them_once_it_is_idle(serving, replica):
    wait_until(lambda: not lives(replica.pid), timeout_s=180)
    serving.wait_for_all(timeout_s=180)
    wait_until(lambda: serving.ask(MODEL).status_code == 200)
