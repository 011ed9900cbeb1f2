"""Images over HTTP to three pools: the encode engine encodes them, and its death changes no answer."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from engine import LLM, SamplingParams
from tests.deployments.parts.images.test_images import data_url, image_part, text_part, user
from tests.engine.multimodal.images import file_of, picture
from tests.scrape import Scrape
from tests.serve.serve_run import ServeRun, wait_until
from tests.vision_models import make_vision_chat_model

pytestmark = [pytest.mark.serve, pytest.mark.slow]

ENGINE = {"dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 512, "block_size": 4}
STARTED = re.compile(r"encode-sees-\w+/rank0 placement\.rank_actor rank starts pid=(\d+)")
HEARD_OF = re.compile(r"prefill-sees-\w+ .* encode engines: (encode-sees-\w+)")
ENCODED = "manta_images_encoded_total"
QUESTION, MAX_TOKENS = "What is this?", 100
FIRST, WHILE_KILLED, AFTERWARDS = range(4), range(4, 8), range(8, 10)  # seeds of pictures that nobody has seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_vision_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(tmp_path_factory, folder) -> Iterator[ServeRun]:
    model = {
        "name": "sees",
        "model": str(folder),
        "engine": {"device": "cpu", **ENGINE},
        "decode": {"num_cpus": 0.2},
        "prefill": {"num_cpus": 0.2},
        "encode": {"num_cpus": 0.2},
        "handoff": {"transport": "tcp", "policy": "always"},
    }
    with ServeRun(tmp_path_factory.mktemp("serve"), {"models": [model]}) as server:
        server.wait_until_healthy(replicas=3)
        wait_until(lambda: len(encode_engines(server)) == 1)
        yield server


@pytest.fixture(scope="module")
def offline(folder) -> list[str]:
    """The answers about the pictures, by their seeds."""
    parts = [{"type": "image", "image": picture(40, 24, seed)} for seed in (*FIRST, *WHILE_KILLED, *AFTERWARDS)]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(str(folder), **ENGINE) as llm:
        chats = llm.chat([user(part, text_part(QUESTION)) for part in parts], params, use_tqdm=False)
        texts = [output.outputs[0].text for output in chats]
    assert len(set(texts)) == len(texts), "the model does not see"
    return texts


def ask(server: ServeRun, seed: int) -> str:
    messages = user(image_part(data_url(file_of(picture(40, 24, seed)))), text_part(QUESTION))
    body = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def count(server: ServeRun, name: str, **labels: str) -> dict[str, float]:
    """The values of a series with these labels, by the role of their engines."""
    scrape = Scrape(httpx.get(f"{server.url}/metrics", timeout=60).text)
    found = scrape.select(name, [(label, "=", value) for label, value in labels.items()])
    return {one.labels["engine"].partition("-")[0]: one.value for one in found}


def encode_engines(server: ServeRun) -> set[str]:
    """The encode engines that the prefill engine has heard of."""
    return {match[1] for line in list(server.log) if (match := HEARD_OF.search(line))}


def check_encoded_there(server: ServeRun, seeds: Sequence[int], offline: Sequence[str]) -> None:
    before = count(server, ENCODED)
    assert [ask(server, seed) for seed in seeds] == [offline[seed] for seed in seeds]
    wait_until(lambda: count(server, ENCODED)["encode"] == before["encode"] + len(seeds))
    assert count(server, ENCODED) == before | {"encode": before["encode"] + len(seeds)}


def test_images_are_encoded_by_the_encode_engine_only_and_answers_are_those_of_the_offline_api(server, offline):
    assert count(server, ENCODED) == {"encode": 0, "prefill": 0, "decode": 0}
    check_encoded_there(server, FIRST, offline)
    came = count(server, "manta_handoffs_total", pool="encode", result="received")
    assert came == {"prefill": len(FIRST)}
    routed = count(server, "manta_routed_requests_total", pool="encode", reason="no_prefix")
    assert routed == {"prefill": len(FIRST), "decode": 0}


def test_the_death_of_an_encode_engine_that_images_wait_for_changes_no_answer(server, offline):
    (pid,) = [int(match[1]) for line in list(server.log) if (match := STARTED.search(line))]
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(len(WHILE_KILLED)) as pool:
        answers = [pool.submit(ask, server, seed) for seed in WHILE_KILLED]
        wait_until(lambda: images_under_way(server) > 0)
        os.kill(pid, signal.SIGKILL)
        assert [answer.result() for answer in answers] == [offline[seed] for seed in WHILE_KILLED]
    wait_until(lambda: count(server, ENCODED)["prefill"] == len(WHILE_KILLED))
    wait_until(lambda: len(encode_engines(server)) == 2, timeout_s=120)


def test_the_encode_engine_in_its_place_gets_the_images_that_come_then(server, offline):
    assert count(server, ENCODED)["encode"] == 0, "it is a new one"
    check_encoded_there(server, AFTERWARDS, offline)


def images_under_way(server: ServeRun) -> int:
    """Images that the prefill engine waits for; prompts come to it from nowhere."""
    live = httpx.get(f"{server.url}/debug/handoffs", timeout=60).json()["handoffs"]
    return sum(one["engine"].startswith("prefill") and one["handoff"]["role"] == "decode" for one in live)
