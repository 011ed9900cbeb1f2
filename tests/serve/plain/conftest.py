"""One `serve run` with two ingresses for all tests that only ask questions, traced and logged in full."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.otlp_receiver import OtlpReceiver
from tests.serve.serve_run import ServeRun


@pytest.fixture(scope="package")
def receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="package")
def server(tmp_path_factory, model_folder, receiver) -> Iterator[ServeRun]:
    args = {
        "models": [{"name": "tiny", "model": str(model_folder)}],
        "ingress": {"num_replicas": 2},
        "log_format": "json",
        "log_level": "debug",
        "tracing": {"otlp_endpoint": receiver.endpoint},
    }
    server = ServeRun(tmp_path_factory.mktemp("serve"), args)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        yield client
