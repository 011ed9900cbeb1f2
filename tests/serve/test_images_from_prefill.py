"""Images over HTTP to two pools: prefill encodes them, and the death of either engine changes no answer."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import httpx
import pytest

from tests.deployments.parts.images.test_images import data_url, image_part, text_part, user
from tests.engine.multimodal.images import file_of, picture
from tests.scrape import Scrape
from tests.serve.serve_run import ServeRun, wait_until
from tests.vision_models import make_vision_chat_model

pytestmark = [pytest.mark.serve, pytest.mark.slow]

STARTED = re.compile(r"((prefill|decode)-sees-\w+)/rank0 placement\.rank_actor rank starts pid=(\d+)")
STREAMS = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServeRun]:
    model = {
        "name": "sees",
        "model": str(make_vision_chat_model(tmp_path_factory.mktemp("model"))),
        "engine": {
            "device": "cpu",
            "dtype": "float32",
            "num_threads": 1,
            "num_gpu_blocks_override": 512,
            "max_num_seqs": 16,
        },
        "decode": {"num_cpus": 0.2, "num_replicas": 2},
        "prefill": {"num_cpus": 0.2, "engine": {"max_num_batched_tokens": 32}},
        "handoff": {"transport": "tcp", "policy": "always"},
    }
    with ServeRun(tmp_path_factory.mktemp("serve"), {"models": [model]}) as server:
        server.wait_until_healthy(replicas=3)
        yield server


def picture_url(seed: int) -> str:
    return data_url(file_of(picture(40, 24, seed)))


def answer(server: ServeRun, seed: int, salt: str, max_tokens: int = 400, running: Barrier | None = None) -> str:
    """What the model says of a picture, with a prompt that no cache has. running: met after the first event."""
    body: dict[str, Any] = {
        "messages": user(image_part(picture_url(seed)), text_part("What is this?")),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
        "stream": True,
    }
    text = ""
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            text += event["choices"][0]["delta"].get("content") or ""
            if running is not None and text:
                running.wait(60)
                running = None
    return text


def metric(server: ServeRun, name: str, **labels: str) -> float:
    return Scrape(httpx.get(f"{server.url}/metrics", timeout=60).text).sum(name, **labels)


def rank_pid(server: ServeRun, role: str) -> int:
    """The process of rank 0 of the newest replica of a pool."""
    found = [match for line in list(server.log) if (match := STARTED.search(line)) and match[2] == role]
    return int(found[-1][3])


@pytest.fixture(scope="module")
def expected(server) -> list[str]:
    texts = [answer(server, seed, "expected") for seed in range(STREAMS)]
    assert len(set(texts)) == STREAMS, "the model does not see"
    return texts


def test_prompts_with_images_are_computed_by_the_prefill_engine(server, expected):
    received = metric(server, "manta_handoffs_total", result="received")
    assert [answer(server, seed, "again") for seed in range(2)] == expected[:2]
    wait_until(lambda: metric(server, "manta_handoffs_total", result="received") == received + 2)


def test_streams_about_images_go_on_unchanged_when_a_decode_engine_is_killed(server, expected):
    running, before = Barrier(STREAMS + 1), metric(server, "manta_request_replays_total")
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(answer, server, seed, "killed decode", running=running) for seed in range(STREAMS)]
        running.wait(60)
        os.kill(rank_pid(server, "decode"), signal.SIGKILL)
        assert [stream.result() for stream in streams] == expected
    assert metric(server, "manta_request_replays_total") > before
    wait_until(lambda: metric(server, "manta_up") == 2, timeout_s=120)


def test_images_are_encoded_by_the_decode_engines_when_the_prefill_engine_is_killed(server, expected):
    pid = rank_pid(server, "prefill")
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(STREAMS) as pool:
        answers = [pool.submit(answer, server, seed, "killed prefill") for seed in range(STREAMS)]
        wait_until(lambda: len(httpx.get(f"{server.url}/debug/handoffs", timeout=60).json()["handoffs"]) > 0)
        os.kill(pid, signal.SIGKILL)
        assert [one.result() for one in answers] == expected
    wait_until(lambda: rank_pid(server, "prefill") != pid, timeout_s=120)
