"""The routes over a real engine: the same numbers as `LLM.embed` and `LLM.score`, through the official client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from deployments.frontend import retry
from engine import LLM, PoolingParams
from engine.errors import EngineUnavailable
from engine.wire.generate_request import GenerateRequest
from tests.deployments.fake_api import LocalPool
from tests.deployments.real_api import BLOCK_SIZE, MAX_NUM_SEQS, real_api
from tests.models import make_model
from tests.pooling_models import KINDS, TEXTS, make, poison, write_json

LABELS = ("sad", "glad", "neither")
PROMPTS = {"prompts": {"query": "what was ", "document": ""}, "default_prompt_name": "query"}
OPTIONS = {"block_size": BLOCK_SIZE, "num_gpu_blocks_override": 512, "max_num_seqs": MAX_NUM_SEQS, "num_threads": 1}


@pytest.fixture
def folder(tmp_path, request) -> Path:
    folder = make(tmp_path, KINDS[request.param])
    write_json(folder / "config_sentence_transformers.json", PROMPTS)
    return folder


@pytest.mark.parametrize("folder", ["qwen3_embedding", "minilm"], indirect=True)
async def test_embeddings_of_the_official_client_are_those_of_the_offline_api(folder):
    async with real_api(folder) as api, client_of(api.client) as client:
        for more in ({}, {"prompt_name": "document"}):
            expected = vectors(folder, **more)
            ask = {"model": "tiny", "input": TEXTS, "extra_body": {"truncate_prompt_tokens": -1, **more}}
            for form in ({}, {"encoding_format": "float"}):  # by default the client asks for base64
                answer = await client.embeddings.create(**ask, **form)
                found = np.array([entry.embedding for entry in answer.data])
                # a batch of other texts sums in another order
                np.testing.assert_allclose(found, expected, atol=1e-6)
        cut = await client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=8)
        assert np.linalg.norm(cut.data[0].embedding) == pytest.approx(1, abs=1e-6)
        assert len(cut.data[0].embedding) == 8
        with pytest.raises(openai.BadRequestError, match="model 'tiny' cannot do 'generate'; it can do: embed"):
            await client.completions.create(model="tiny", prompt="a")


def vectors(folder: Path, prompt_name: str | None = None) -> np.ndarray:
    with LLM(str(folder), **OPTIONS) as llm:
        params = PoolingParams(truncate_prompt_tokens=-1)
        found = llm.embed(TEXTS, params, prompt_name=prompt_name, use_tqdm=False)
        return np.array([output.outputs.embedding for output in found])


@pytest.mark.parametrize("folder", ["qwen3_embedding", "minilm", "ms_marco_minilm", "bge_reranker"], indirect=True)
async def test_rankings_have_the_scores_of_the_offline_api(folder):
    documents = ["the lazy dog", "A cache keeps what was", "fox"]
    with LLM(str(folder), **OPTIONS) as llm:
        scores = [output.outputs.score for output in llm.score("the fox", documents, use_tqdm=False)]
    async with real_api(folder) as api:
        response = await api.client.post("/v1/rerank", json={"query": "the fox", "documents": documents})
        results = response.json()["results"]
        found = {result["index"]: result["relevance_score"] for result in results}
        assert [found[i] for i in range(3)] == pytest.approx(scores, abs=1e-6)
        assert [result["index"] for result in results] == sorted(range(3), key=lambda i: -scores[i])


async def test_a_generative_reranker_ranks_and_scores_by_the_prompt_of_its_card(tmp_path):
    folder = make_model(tmp_path, "qwen3", tokenizer=True)
    write_json(
        folder / "modules.json",
        [{"idx": 1, "path": "1", "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}],
    )
    write_json(folder / "1/config.json", {"true_token_id": 5, "false_token_id": 6})
    documents = ["the lazy dog", "A cache keeps what was"]
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.score("the fox", documents, instruction="find", use_tqdm=False)
        expected = [output.outputs.score for output in outputs]
    async with real_api(folder) as api:
        body = {"documents": documents, "instruction": "find"}
        ranked = (await api.client.post("/rerank", json={"query": "the fox", **body})).json()["results"]
        scored = (await api.client.post("/score", json={"queries": "the fox", **body})).json()["data"]
        assert [entry["score"] for entry in scored] == pytest.approx(expected, abs=1e-5)
        found = {entry["index"]: entry["relevance_score"] for entry in ranked}
        assert [found[i] for i in range(2)] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("folder", ["qwen3_guard"], indirect=True)
async def test_classes_of_texts_and_of_their_tokens_are_those_of_the_offline_api(folder):
    with LLM(str(folder), **OPTIONS) as llm:
        params, quiet = PoolingParams(truncate_prompt_tokens=-1), {"use_tqdm": False}
        of_texts = [output.outputs.probs for output in llm.classify(TEXTS, params, **quiet)]
        of_tokens = [out.outputs.data for out in llm.encode(TEXTS, params, pooling_task="token_classify", **quiet)]
    async with real_api(folder) as api:
        body = {"input": TEXTS, "truncate_prompt_tokens": -1}
        classes = (await api.client.post("/classify", json=body)).json()["data"]
        tokens = (await api.client.post("/pooling", json={**body, "task": "token_classify"})).json()["data"]
    np.testing.assert_allclose([entry["probs"] for entry in classes], of_texts, atol=1e-5)
    assert [entry["label"] for entry in classes] == [LABELS[int(np.argmax(probs))] for probs in of_texts]
    for entry, numbers in zip(tokens, of_tokens, strict=True):
        np.testing.assert_allclose(entry["data"], numbers, atol=1e-5)


@pytest.mark.parametrize("folder", ["minilm"], indirect=True)
async def test_a_text_whose_embedding_is_not_finite_fails_its_request_alone(folder):
    poison(folder)
    async with real_api(folder) as api:
        answers = await asyncio.gather(*(api.client.post("/v1/embeddings", json={"input": ["dog"] * 40 + [last]})
                                         for last in ("fox", "cache")))  # fmt: skip
        assert [answer.status_code for answer in answers] == [500, 200]
        await api.scrape_when(lambda s: s.sum("vllm:request_success_total", finished_reason="stop") >= 41)


@pytest.mark.parametrize("folder", ["qwen3_embedding", "minilm"], indirect=True)
async def test_texts_whose_engine_is_lost_are_computed_again_as_a_whole(folder, monkeypatch):
    calls: list[tuple[GenerateRequest, ...]] = []
    generate = LocalPool.generate

    async def fails_at_first(self: LocalPool, *requests: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        calls.append(requests)
        if len(calls) == 1:
            await generate(self, *requests[:2])
            raise EngineUnavailable("rank 0 died")
        await generate(self, *requests)

    async with real_api(folder) as api:
        body = {"input": TEXTS, "truncate_prompt_tokens": -1}
        expected = (await api.client.post("/v1/embeddings", json=body)).json()["data"]
        monkeypatch.setattr(retry, "BACK_OFF_S", 0.0)
        monkeypatch.setattr(LocalPool, "generate", fails_at_first)
        found = (await api.client.post("/v1/embeddings", json=body)).json()["data"]
        for entry, other in zip(found, expected, strict=True):
            assert entry["embedding"] == pytest.approx(other["embedding"], abs=1e-6)
        first, *later = calls
        lost = {f"{request.request_id}.1": request for request in first}
        assert len(later) >= len(TEXTS) - 2, "two may have been answered before"
        for (again,) in later:
            assert (again.prompt, again.needs) == (lost[again.request_id].prompt, lost[again.request_id].needs)
        replays = (await api.scrape()).sum("manta_request_replays_total", reason="engine_unavailable")
        assert replays == len(later)


def client_of(client: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
