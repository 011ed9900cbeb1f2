"""An embedding model behind a real `serve run`: a folder in the configuration is all it takes."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest

from engine import LLM
from tests.pooling_models import EMBEDDINGS, TEXTS, make
from tests.scrape import Scrape
from tests.serve.serve_run import ServeRun, wait_until

pytestmark = [pytest.mark.serve, pytest.mark.slow]

SHORT = TEXTS[1:4] * 30


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: make(tmp_path_factory.mktemp(name), EMBEDDINGS[name]) for name in ("qwen3_embedding", "minilm")}


@pytest.fixture(scope="module")
def server(tmp_path_factory, folders) -> Iterator[ServeRun]:
    models = [
        {
            "name": name,
            "model": str(folder),
            "engine": {"num_gpu_blocks_override": 128, "max_num_seqs": 8},
            "decode": {"num_cpus": 0.3, "num_replicas": replicas},
        }
        for (name, folder), replicas in zip(folders.items(), (2, 1), strict=True)
    ]
    with ServeRun(tmp_path_factory.mktemp("serve"), {"models": models}) as server:
        server.wait_until_healthy(replicas=3)
        yield server


@pytest.mark.parametrize("name", ["qwen3_embedding", "minilm"])
def test_embeddings_are_those_of_the_offline_api(server, folders, name):
    with LLM(str(folders[name]), num_gpu_blocks_override=128) as llm:
        expected = [output.outputs.embedding for output in llm.embed(SHORT, use_tqdm=False)]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        found = [entry.embedding for entry in client.embeddings.create(model=name, input=SHORT).data]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_an_encoder_ranks_and_refuses_to_generate(server):
    body = {"model": "minilm", "query": "the fox", "documents": ["the lazy dog", "the fox"]}
    results = httpx.post(f"{server.url}/v1/rerank", json=body, timeout=30).json()["results"]
    assert sorted(result["index"] for result in results) == [0, 1]
    assert results[0]["relevance_score"] >= results[1]["relevance_score"]
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": "minilm", "prompt": "a"}, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "model 'minilm' cannot do 'generate'; it can do: embed, token_embed"


def test_texts_count_in_the_metrics_and_none_is_left_in_an_engine(server):
    def scrape() -> Scrape:
        return Scrape(httpx.get(f"{server.url}/metrics", timeout=60).text)

    wait_until(lambda: scrape().sum("vllm:num_requests_running") == 0)
    body = {"model": "qwen3_embedding", "input": SHORT}
    before = scrape().sum("vllm:request_success_total", model_name="qwen3_embedding", finished_reason="stop")
    assert httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=30).status_code == 200
    after = scrape().sum("vllm:request_success_total", model_name="qwen3_embedding", finished_reason="stop")
    assert after - before == len(SHORT)
    wait_until(lambda: scrape().sum("vllm:num_requests_running") == 0)
