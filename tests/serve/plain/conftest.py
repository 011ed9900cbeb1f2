"""One `serve run` for all tests that only ask questions."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.serve.serve_run import ServeRun


@pytest.fixture(scope="package")
def server(tmp_path_factory, model_folder) -> Iterator[ServeRun]:
    model = {"name": "tiny", "model": str(model_folder)}
    server = ServeRun(tmp_path_factory.mktemp("serve"), {"models": [model]})
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        yield client
