"""One `serve run` with two ingresses and two decode replicas, traced and logged in full, for all tests that only ask
questions, and one that kills a replica."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.otlp_receiver import OtlpReceiver
from tests.serve.serve_run import ServeRun

REPLICAS = 2
DECODE = {"num_cpus": 0.3, "num_replicas": REPLICAS}
ENGINE = {"dtype": "bfloat16", "block_size": 4, "num_gpu_blocks_override": 8192, "num_threads": 1, "enable_lora": True}


@pytest.fixture(scope="package")
def receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="package")
def server(tmp_path_factory, model_folder, receiver) -> Iterator[ServeRun]:
    args = {
        "models": [{"name": "tiny", "model": str(model_folder), "engine": ENGINE, "decode": DECODE}],
        "ingress": {"num_replicas": 2, "allow_runtime_lora_updating": True},
        "log_format": "json",
        "log_level": "debug",
        "tracing": {"otlp_endpoint": receiver.endpoint},
    }
    with ServeRun(tmp_path_factory.mktemp("serve"), args) as server:
        server.wait_until_healthy(REPLICAS)
        yield server


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        yield client
