"""One `serve run` with three decode replicas of one model. Tests kill some; each begins when all three are up.

All are slow; in ordinary runs two replicas of a smaller model do (plain/test_replicas.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.scrape import Scrape
from tests.serve.serve_run import ServeRun, wait_until

REPLICAS = 3


@pytest.fixture(scope="package")
def adapters_folder(tmp_path_factory) -> Path:
    """The server's dynamic folder."""
    return Path(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="package")
def started(tmp_path_factory, adapters_folder) -> Iterator[ServeRun]:
    engine = {"device": "cpu", "dtype": "bfloat16", "num_threads": 1, "num_gpu_blocks_override": 1024, "block_size": 4}
    decode = {"num_cpus": 0.3, "num_replicas": REPLICAS}
    model = {"name": "pocket", "model": "pocket", "engine": engine, "decode": decode}
    model |= {"lora_modules": {"pirate": "pocket-pirate"}, "lora": {"dynamic_folder": str(adapters_folder)}}
    args = {"models": [model], "ingress": {"allow_runtime_lora_updating": True}}
    with ServeRun(tmp_path_factory.mktemp("serve"), args) as server:
        server.wait_until_healthy(REPLICAS)
        yield server


@pytest.fixture
def server(started) -> ServeRun:
    def up() -> float:
        return Scrape(httpx.get(f"{started.url}/metrics", timeout=60).text).sum("manta_up")

    wait_until(lambda: up() == REPLICAS, timeout_s=120)
    return started
