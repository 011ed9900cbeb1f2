"""Requests with which engines end, among streams of others: these end as if nothing had happened, and the engines that
are lost are two."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import pytest

from deployments import without_pandas
from engine.black_box import compile_key, read_key
from engine.lora.adapter_files import open_adapter
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.adapter_folders import write_adapter
from tests.scrape import Scrape
from tests.serve import killers
from tests.serve.replicas.test_replay import explained, processes, stream
from tests.serve.serve_run import RANK, ServeRun, wait_until

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(600)]

REPLICAS = 2
LONG = {"max_tokens": 400, "ignore_eos": True}
OTHERS: list[dict[str, Any]] = [
    *({"prompt": f"{i} quick foxes", "temperature": 0, **LONG} for i in range(5)),
    *({"prompt": f"{i} lazy dogs", "temperature": 1, "seed": i, **LONG} for i in range(3)),
]


@pytest.fixture(scope="module")
def killing(tmp_path_factory) -> Path:
    """The file that says what ends engines."""
    file: Path = tmp_path_factory.mktemp("killers") / "killers"
    file.write_text("")
    return file


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> Path:
    """The folder in which the ingress looks for adapters that no engine has read yet."""
    folder: Path = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "sql", inputs=48, outputs=64)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory, model_folder, adapters, killing) -> Iterator[ServeRun]:
    engine = {
        "dtype": "bfloat16",
        "block_size": 4,
        "num_gpu_blocks_override": 8192,
        "num_threads": 1,
        "enable_lora": True,
        "tape_mib": 0,
    }
    decode = {"num_cpus": 0.3, "num_replicas": REPLICAS, "stall_timeout_s": 3.0}
    args = {
        "models": [
            {
                "name": "tiny",
                "model": str(model_folder),
                "engine": engine,
                "decode": decode,
                "lora": {"dynamic_folder": str(adapters)},
            }
        ],
        "ingress": {"num_replicas": 2},
    }
    preloaded = f"{without_pandas.__name__},{killers.__name__}"
    own = str(Path(killers.__file__).parents[2])  # the tests are installed nowhere
    environment = {killers.VARIABLE: str(killing), "RAY_preload_python_modules": preloaded, "PYTHONPATH": own}
    with ServeRun(tmp_path_factory.mktemp("serve"), args, environment=environment) as server:
        server.wait_until_healthy(REPLICAS)
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left(killing) -> Iterator[None]:
    yield
    killing.write_text("")


def up(server: ServeRun) -> float:
    return Scrape(httpx.get(f"{server.url}/metrics", timeout=60).text).sum("manta_up")


def deaths(server: ServeRun) -> int:
    return sum("replica exits, because its engine ended" in line for line in server.worker_lines())


SCHEMA = {"regex": "[ab]{3}"}
REGEX = StructuredOutputsParams(regex=SCHEMA["regex"])
CASES = {
    "read": ({"model": "sql"}, "read adapter 'sql'"),
    "compile": ({"structured_outputs": SCHEMA}, "compiled its grammar or schema"),
    "compute": ({}, "computed this request"),
}


@pytest.mark.parametrize(
    ("phase", "end"),
    [("read", "SIGSEGV"), ("compile", "SIGABRT"), ("compute", "SIGSEGV"), ("compute", "raises"), ("compute", "hangs")],
)
def test_a_request_with_which_two_engines_end_is_refused_and_its_neighbours_are_not(
    server, killing, adapters, phase, end
):
    wait_until(lambda: up(server) == REPLICAS, timeout_s=200)
    asked, what = CASES[phase]
    name = f"poison-{phase}-{end}"
    keys = {
        "read": read_key(open_adapter(adapters / "sql").digest),
        "compile": compile_key(REGEX.kind, REGEX.text),
        "compute": f"computes cmpl-{name}x",
    }
    poison = {"model": "tiny", "prompt": f"The end by {end}", "max_tokens": 3, **asked}
    with ThreadPoolExecutor(len(OTHERS)) as pool:
        expected = list(pool.map(lambda body: stream(server, body)[:2], OTHERS))
        before = deaths(server)
        running = Barrier(len(OTHERS) + 1)
        streams = [pool.submit(stream, server, {**body, "request_id": f"{name}-other-{i}"}, running)
                   for i, body in enumerate(OTHERS)]  # fmt: skip
        running.wait(60)
        killing.write_text(f"{keys[phase]} {end}\n")
        answer = httpx.post(f"{server.url}/v1/completions", json={**poison, "request_id": f"{name}x"}, timeout=180)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "poison_request"), answer.text
        assert f"two engines have ended while they {what}" in answer.json()["error"]["message"]
        assert [one.result(timeout=180)[:2] for one in streams] == expected
    started = time.monotonic()
    for _ in range(4):  # some of them come to the other ingress
        again = httpx.post(f"{server.url}/v1/completions", json={**poison, "request_id": f"{name}x"}, timeout=60)
        assert (again.status_code, again.json()["error"]["code"]) == (422, "poison_request")
    assert time.monotonic() - started < 4
    assert deaths(server) - before == 2


def test_who_is_killed_from_outside_twice_is_not_to_blame(server):
    wait_until(lambda: up(server) == REPLICAS, timeout_s=200)
    body = {"prompt": "An innocent", "temperature": 0, "max_tokens": 450, "ignore_eos": True}
    expected = stream(server, body)[:2]
    with ThreadPoolExecutor(1) as pool:
        running = Barrier(2)
        found = pool.submit(stream, server, {**body, "request_id": "innocent"}, running)
        running.wait(60)
        for replays in (1, 2):
            for rank in processes(server, RANK):
                rank.kill()
            wait_until(lambda: up(server) == REPLICAS, timeout_s=200)
            assert explained(server, "innocent")["replays"] >= min(replays, 1)
        assert found.result(timeout=180)[:2] == expected
    assert stream(server, body)[:2] == expected
