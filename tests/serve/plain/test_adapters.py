"""Adapters of two ingresses over Ray's own store."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import psutil
import pytest

from tests.adapter_folders import write_adapter
from tests.serve.replicas.test_replay import processes
from tests.serve.serve_run import ServeRun, wait_until

pytestmark = pytest.mark.serve

TIMES = 16  # all through the same ingress once in 33,000 runs


def post(server: ServeRun, route: str, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{route}", json=body, timeout=120)


def roots(server: ServeRun) -> set[str | None]:
    """The paths that the ingresses give for `sql`; None from one that has no such adapter."""
    answers = [httpx.get(f"{server.url}/v1/models/sql", timeout=60) for _ in range(TIMES)]
    return {answer.json().get("root") for answer in answers}


@pytest.mark.slow
def test_what_is_loaded_and_unloaded_through_one_ingress_is_so_for_both(server, tmp_path):
    folders = [str(write_adapter(tmp_path / str(i), seed=i, inputs=48, outputs=64)) for i in range(6)]

    def load(folder: str) -> int:
        return post(server, "load_lora_adapter", lora_name="sql", lora_path=folder).status_code

    with ThreadPoolExecutor(len(folders)) as pool:
        for _ in range(2):  # the name is free again after an unload
            statuses = list(pool.map(load, folders))
            assert sorted(statuses) == [200, *[400] * (len(folders) - 1)], statuses
            winner = folders[statuses.index(200)]
            assert roots(server) == {winner}
            asked = [{"model": name, "prompt": "The", "max_tokens": 8, "temperature": 0} for name in ("tiny", "sql")]
            answers = list(pool.map(lambda body: post(server, "completions", **body).json(), asked * TIMES))
            texts = {answer["model"]: {a["choices"][0]["text"] for a in answers if a["model"] == answer["model"]}
                     for answer in answers}  # fmt: skip
            assert len(texts["sql"]) == 1 == len(texts["tiny"]) and texts["sql"] != texts["tiny"]
            assert post(server, "unload_lora_adapter", lora_name="sql").status_code == 200
            wait_until(lambda: roots(server) == {None})
            assert post(server, "unload_lora_adapter", lora_name="sql").status_code == 404


@pytest.mark.slow
def test_an_ingress_that_takes_the_place_of_a_killed_one_knows_what_was_loaded(server, tmp_path):
    def ingresses() -> list[int]:
        with suppress(psutil.Error):  # one that ends just now
            return [process.pid for process in processes(server, "ray::ServeReplica:manta:ingress")]
        return []

    folder = str(write_adapter(tmp_path / "sql", inputs=48, outputs=64))
    assert post(server, "load_lora_adapter", lora_name="sql", lora_path=folder).status_code == 200
    before = ingresses()
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: len(ingresses()) == 2 and before[0] not in ingresses(), timeout_s=120)
    wait_until(lambda: httpx.get(f"{server.url}/health", timeout=10).status_code == 200)
    assert roots(server) == {folder}
    assert post(server, "unload_lora_adapter", lora_name="sql").status_code == 200
    wait_until(lambda: roots(server) == {None})
