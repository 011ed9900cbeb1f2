from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.models import make_model
from tests.serve.serve_run import ServeRun


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


@pytest.fixture(scope="session")
def server(tmp_path_factory, model_folder) -> Iterator[ServeRun]:
    """One `serve run` for all tests that only ask questions."""
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
