"""Images over HTTP to two replicas of one model, by the OpenAI client and by the example of the docs."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine import LLM, SamplingParams
from tests.deployments.parts.images.test_images import data_url, image_part, text_part, user
from tests.engine.multimodal.images import file_of, picture
from tests.scrape import Scrape
from tests.serve.serve_run import ServeRun, wait_until
from tests.vision_models import make_vision_chat_model

pytestmark = [pytest.mark.serve, pytest.mark.slow]

DOCS = Path(__file__).parents[2] / "docs" / "images.md"
ENGINE = {"dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 512, "block_size": 4}
STARTED = re.compile(r"(decode-sees-\w+)/rank0 placement\.rank_actor rank starts pid=(\d+)")
QUESTIONS = ["What is this?", "Where was it?", "Who is there?", "How many are there?"]
MAX_TOKENS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_vision_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(tmp_path_factory, folder) -> Iterator[ServeRun]:
    model = {
        "name": "sees",
        "model": str(folder),
        "engine": {"device": "cpu", **ENGINE},
        "decode": {"num_cpus": 0.2, "num_replicas": 2},
    }
    images = {"allowed_private_networks": ["127.0.0.1/32"]}
    args = {"models": [model], "ingress": {"images": images}}
    with ServeRun(tmp_path_factory.mktemp("serve"), args) as server:
        server.wait_until_healthy(replicas=2)
        yield server


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


@pytest.fixture
def image_url() -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(file_of(picture(40, 24, seed=1)))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/image.png"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def offline(folder) -> list[str]:
    """The answers to QUESTIONS about the picture 1, and to the first one about 1 and 2, and without a picture."""
    pictures = [{"type": "image", "image": picture(40, 24, seed)} for seed in (1, 2)]
    asked = [user(pictures[0], text_part(question)) for question in QUESTIONS]
    asked += [user(*pictures, text_part(QUESTIONS[0])), user(text_part(QUESTIONS[0]))]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(str(folder), **ENGINE) as llm:
        texts = [output.outputs[0].text for output in llm.chat(asked, params, use_tqdm=False)]
    assert len(set(texts)) == len(texts)
    return texts


def ask(client: openai.OpenAI, *parts: dict[str, Any]) -> str:
    messages: Any = user(*parts)
    answer = client.chat.completions.create(
        model="sees", messages=messages, temperature=0, max_tokens=MAX_TOKENS, extra_body={"ignore_eos": True}
    )
    return answer.choices[0].message.content or ""


def metric(server: ServeRun, name: str) -> float:
    return Scrape(httpx.get(f"{server.url}/metrics", timeout=60).text).sum(name)


def test_answers_are_those_of_the_offline_api_and_each_replica_encodes_an_image_once(
    server, client, offline, image_url
):
    first, second = (image_part(data_url(file_of(picture(40, 24, seed)))) for seed in (1, 2))
    before = metric(server, "manta_images_encoded_total")
    found = [ask(client, first, text_part(question)) for question in QUESTIONS]
    assert found == offline[: len(QUESTIONS)]
    assert ask(client, image_part(image_url), text_part(QUESTIONS[0])) == offline[0]
    wait_until(lambda: metric(server, "manta_images_encoded_total") > before)
    assert metric(server, "manta_images_encoded_total") <= before + 2
    assert ask(client, first, second, text_part(QUESTIONS[0])) == offline[-2]
    assert ask(client, text_part(QUESTIONS[0])) == offline[-1]


def test_a_stream_about_an_image_goes_on_when_its_engine_is_killed(server, client, offline):
    before, killed, text = metric(server, "manta_request_replays_total"), False, ""
    messages: Any = user(image_part(data_url(file_of(picture(40, 24, 1)))), text_part(QUESTIONS[0]))
    stream = client.chat.completions.create(
        model="sees",
        messages=messages,
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        extra_body={"ignore_eos": True, "request_id": "killed"},
    )
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if text and not killed:
            (timeline,) = httpx.get(f"{server.url}/debug/requests/killed", timeout=60).json()["sequences"]
            pids = dict(match.groups() for line in list(server.log) if (match := STARTED.search(line)))
            os.kill(int(pids[timeline["engines"][-1]]), signal.SIGKILL)
            killed = True
    assert text == offline[0]
    assert metric(server, "manta_request_replays_total") == before + 1
    wait_until(lambda: metric(server, "manta_up") == 2, timeout_s=120)


def test_the_example_of_the_docs_runs_as_it_is_written(server, tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    (tmp_path / "photo.jpg").write_bytes(file_of(picture(40, 24), "JPEG"))
    monkeypatch.chdir(tmp_path)
    assert "http://localhost:8000" in code
    exec(compile(code.replace("http://localhost:8000", server.url), str(DOCS), "exec"), {})
    assert capsys.readouterr().out.strip()
