"""The routes over a fake engine: what it is asked, and what becomes of its answer."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import pytest

from deployments.pooling import pooled_model
from engine.wire.parts.pooling import PoolingParams, SupportedTasks
from tests.deployments.fake_api import ALL_TASKS, MAX_MODEL_LEN, FakeApi, fake_api, tokenizer, until
from tests.scenarios import run

EMBEDS = SupportedTasks(
    names=("embed",), embedding_size=4, prompts={"query": "ask: ", "document": ""}, default_prompt_name="query"
)


async def embed(api: FakeApi, **body: Any) -> dict[str, Any]:
    response = await api.post("embeddings", **body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_embeddings_come_in_the_order_of_their_texts_whatever_order_they_are_computed_in(api):
    texts = ["a", "a fox", "the lazy dog", "b"]
    answer = await embed(api, input=texts)
    ids = [tokenizer().encode(text) for text in texts]
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2, 3]
    assert [entry["embedding"] for entry in answer["data"]] == [[i[0], i[-1], len(i), sum(i)] for i in ids]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (sum(map(len, ids)),) * 2
    assert (answer["object"], answer["data"][0]["object"], answer["model"]) == ("list", "embedding", "fake")


async def test_pooling_gives_the_same_vectors_in_the_form_of_vllm(api):
    body = {"input": ["a", "a fox"], "encoding_format": "float"}
    expected = [entry["embedding"] for entry in (await embed(api, **body))["data"]]
    answer = (await api.client.post("/pooling", json={"model": "fake", "task": "embed", **body})).json()
    assert [(entry["index"], entry["object"]) for entry in answer["data"]] == [(0, "pooling"), (1, "pooling")]
    assert [entry["data"] for entry in answer["data"]] == expected and answer["object"] == "list"
    refused = await api.client.post("/pooling", json={"model": "fake", "task": "score", **body})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "task"


CLASSIFIES = SupportedTasks(names=("classify", "token_classify"), labels=("a", "b", "c", "d"))
EMBEDS_TOKENS = SupportedTasks(names=("embed", "token_embed"), embedding_size=4)


async def test_classes_come_in_the_form_of_vllm_with_the_name_of_the_most_probable():
    async with fake_api(supported_tasks=CLASSIFIES) as api:
        answer = (await api.client.post("/classify", json={"input": [[5, 6], [9, 7]]})).json()
        assert answer["data"] == [
            {"index": 0, "label": "d", "probs": [5, 6, 2, 11], "num_classes": 4},
            {"index": 1, "label": "d", "probs": [9, 7, 2, 16], "num_classes": 4},
        ]
        assert answer["id"].startswith("classify-") and answer["object"] == "list"
        assert answer["usage"]["total_tokens"] == 4
        same = (await api.client.post("/pooling", json={"input": [[5, 6], [9, 7]]})).json()
        assert [entry["data"] for entry in same["data"]] == [entry["probs"] for entry in answer["data"]]


@pytest.mark.parametrize(("tasks", "task"), [(CLASSIFIES, "token_classify"), (EMBEDS_TOKENS, "token_embed")])
async def test_pooling_gives_a_vector_of_each_token_if_asked(tasks, task):
    async with fake_api(supported_tasks=tasks) as api:
        body = {"input": [[5, 6], [7]], "task": task}
        answer = (await api.client.post("/pooling", json=body)).json()
        assert [entry["data"] for entry in answer["data"]] == [[[5, 6, 2, 11]] * 2, [[7, 7, 1, 7]]]
        coded = (await api.client.post("/pooling", json={**body, "encoding_format": "base64"})).json()
        numbers = np.frombuffer(base64.b64decode(coded["data"][0]["data"]), "<f4")
        assert numbers.tolist() == [5, 6, 2, 11] * 2


async def test_an_answer_with_too_many_vectors_is_refused_before_the_engine_sees_it(monkeypatch):
    monkeypatch.setattr(pooled_model, "MAX_NUMBERS", 12)
    async with fake_api(supported_tasks=EMBEDS_TOKENS) as api:
        body = {"input": [[5, 6], [7, 8]], "task": "token_embed"}
        error = (await api.client.post("/pooling", json=body)).json()["error"]
        limit = "input must have at most 3 tokens together, because each has 4 numbers in the answer, got 4"
        assert (error["message"], error["param"]) == (limit, "input")
        assert not api.engine.added
        assert (await api.client.post("/pooling", json={**body, "dimensions": 3})).status_code == 200


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("ab", [[67, 68]]), ([5, 6], [[5, 6]]), ([[5, 6], [7]], [[5, 6], [7]]), (["a", "b"], [[67], [68]])],
)
def test_an_input_is_a_text_or_token_ids_or_a_list_of_either(given, prompts):
    async def scenario() -> None:
        async with fake_api() as api:
            answer = await embed(api, input=given)
            assert [entry["embedding"][2] for entry in answer["data"]] == [len(prompt) for prompt in prompts]
            assert sorted(request.prompt for request in api.engine.added) == sorted(prompts)

    run(scenario())


async def test_base64_has_the_bytes_of_the_numbers_and_dimensions_cut_them(api):
    answer = await embed(api, input=[5, 6, 7], encoding_format="base64", dimensions=3)
    numbers = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    assert numbers.tolist() == [5, 7, 3]


async def test_the_models_prompt_stands_in_front_of_texts_and_not_of_token_ids():
    async with fake_api(supported_tasks=EMBEDS) as api:
        for body, prompt in [
            ({"input": "fox"}, tokenizer().encode("ask: fox")),
            ({"input": "fox", "prompt_name": "document"}, tokenizer().encode("fox")),
            ({"input": [5, 6]}, [5, 6]),
        ]:
            await embed(api, **body)
            assert api.engine.added[-1].prompt == prompt
        error = (await api.post("embeddings", input="fox", prompt_name="passage")).json()["error"]
        expected = "prompt_name must be one of the model's prompts (query, document), got 'passage'"
        assert (error["message"], error["param"]) == (expected, "prompt_name")


async def test_a_ranking_has_the_best_documents_first_and_their_texts(api):
    documents = ["a", {"text": "the quick brown fox"}, "a fox"]
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        response = await api.client.post(path, json={"query": "fox", "documents": documents, "top_n": 2})
        results = response.json()["results"]
        assert [result["index"] for result in results] == [1, 2]
        assert results[0]["document"] == {"text": "the quick brown fox", "multi_modal": None}
        assert results[0]["relevance_score"] > results[1]["relevance_score"]
    body = {"query": "fox", "documents": documents, "return_documents": False}
    results = (await api.post("rerank", **body)).json()["results"]
    assert [set(result) for result in results] == [{"index", "relevance_score"}] * 3


async def test_scores_are_of_one_query_with_each_document_or_of_pairs(api):

    async def prompts(**body: Any) -> list[list[int]]:
        before = len(api.engine.added)
        response = await api.post("score", **body)
        added = api.engine.added[before:]
        assert [entry["index"] for entry in response.json()["data"]] == list(range(len(added)))
        return sorted(request.prompt for request in added)

    one_to_two = await prompts(queries="a", documents=["b", "c"])
    assert len(one_to_two) == 2
    assert await prompts(text_1=["a"], text_2=["b", "c"]) == one_to_two
    assert await prompts(queries=["a", "a"], documents=["b", "c"]) == one_to_two
    assert await prompts(queries=["d", "a"], documents=["b", "c"]) != one_to_two


async def test_an_empty_document_has_a_score_too(api):
    response = await api.post("rerank", query="a", documents=["", "b"], truncate_prompt_tokens=8)
    assert [result["index"] for result in response.json()["results"]] == [0, 1]
    assert [len(request.prompt) for request in api.engine.added] == [8, 8]


async def test_scores_of_an_embedding_model_are_cosines_of_the_query_with_its_prompt():
    async with fake_api(supported_tasks=EMBEDS) as api:
        answer = (await api.post("score", queries="a", documents=["b"])).json()
        ids = [tokenizer().encode("ask: a"), tokenizer().encode("b")]
        assert sorted(request.prompt for request in api.engine.added) == sorted(ids)
        query, document = (np.array([i[0], i[-1], len(i), sum(i)], "<f4") for i in ids)
        assert answer["data"][0]["score"] == float(query @ document)  # the engine would have scaled them
        assert all(request.record(PoolingParams).use_activation for request in api.engine.added)
        assert answer["usage"]["total_tokens"] == len(ids[0]) + len(ids[1])


GENERATES = SupportedTasks(names=("generate",))
RANKS = SupportedTasks(names=("score",))


@pytest.mark.parametrize(
    ("tasks", "path", "body", "task"),
    [
        (EMBEDS, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "generate"),
        (EMBEDS, "/v1/completions", {"prompt": "a"}, "generate"),
        (RANKS, "/v1/embeddings", {"input": "a"}, "embed"),
        (GENERATES, "/v1/embeddings", {"input": "a"}, "embed"),
        (EMBEDS, "/classify", {"input": "a"}, "classify"),
        (EMBEDS, "/pooling", {"input": "a", "task": "token_embed"}, "token_embed"),
        (SupportedTasks(names=("classify",)), "/v1/score", {"queries": "a", "documents": "b"}, "score"),
    ],
)
async def test_what_a_model_cannot_do_is_refused_with_its_name_and_what_it_can(tasks, path, body, task):
    async with fake_api(supported_tasks=tasks) as api:
        response = await api.client.post(path, json=body)
        error = response.json()["error"]
        message = f"model 'fake' cannot do {task!r}; it can do: {', '.join(tasks.names)}"
        assert (response.status_code, error["message"], error["param"]) == (400, message, "model")


MATRYOSHKA = SupportedTasks(names=("embed",), embedding_size=4, matryoshka_dimensions=(2, 4))


@pytest.mark.parametrize(
    ("tasks", "dimensions", "limit"),
    [
        (ALL_TASKS, 5, "at most 4, the size"),
        (ALL_TASKS, 0, "at least 1"),
        (MATRYOSHKA, 3, "the model was trained for (2, 4)"),
    ],
)
async def test_dimensions_that_an_embedding_cannot_have_are_refused(tasks, dimensions, limit):
    async with fake_api(supported_tasks=tasks) as api:
        response = await api.post("embeddings", input="a", dimensions=dimensions)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "dimensions"
        assert limit in response.json()["error"]["message"]


LONG = "a " * 2 * MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("path", "body", "param", "named"),
    [
        ("embeddings", {}, "input", "input is required"),
        *(("embeddings", {"input": bad}, "input", "input") for bad in ("", [], [""], [[]], 5, ["a", 1], ["a", [5]])),
        ("embeddings", {"input": ["a"] * 2049}, "input", "at most 2048 items"),
        ("embeddings", {"input": [[5], [400]]}, "input[1]", "token ids from 0 to 399, got 400"),
        ("embeddings", {"input": [5, -1]}, "input", "token ids from 0 to 399, got -1"),
        ("embeddings", {"input": ["a", LONG]}, "input", "input[1] is too long: "),
        ("embeddings", {"input": "a" * 100_000}, "input", "counted no further"),
        ("embeddings", {"input": [5] * 513}, "input", "input is too long: 513 tokens > 512"),
        ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ("embeddings", {"input": "a", "priority": 1}, "priority", "priority must be 0"),
        ("embeddings", {"input": "a", "messages": [{}]}, "messages", "put the text into input"),
        ("embeddings", {"input": "a", "truncation_side": "left"}, "truncation_side", "always cut at the end"),
        ("embeddings", {"input": "a", "model": "other"}, "model", "this server has: fake"),
        ("score", {"queries": "a"}, "documents", "documents is required"),
        ("score", {"text_1": "a", "documents": "b"}, "text_2", "text_2 is required"),
        ("score", {"queries": "a", "documents": "b", "text_1": "c"}, "text_1", "must be left out"),
        ("score", {"queries": ["a", "b"], "documents": ["c"]}, "queries", "as many as there are documents (1), or one"),
        ("score", {"queries": "a", "documents": ["b", LONG]}, "documents", "documents[1] is too long: "),
        ("rerank", {"query": "a", "documents": []}, "documents", "documents"),
        ("rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents", "documents[0]"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "top_n"),
        ("rerank", {"query": "a" * 2**17, "documents": ["b"] * 600}, "documents", "67108864 characters"),
        ("rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "max_tokens_per_doc", "use truncate"),
    ],
)  # fmt: skip
async def test_a_bad_request_is_refused_by_the_name_of_its_field_before_the_engine_sees_it(
    path, body, param, named, api
):
    response = await api.post(path, **body)
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert (error["param"], error["type"][-5:]) == (param, "error")
    assert named in error["message"]
    assert len(error["message"]) < 400
    assert not api.engine.added


async def test_a_long_text_is_cut_if_the_request_says_so(api):
    for text, kept, tokens in [(LONG, -1, MAX_MODEL_LEN), ([5] * 600, -1, MAX_MODEL_LEN), (LONG, 7, 7)]:
        answer = await embed(api, input=text, truncate_prompt_tokens=kept)
        assert answer["usage"]["total_tokens"] == tokens == answer["data"][0]["embedding"][2]


async def test_a_client_that_leaves_ends_what_runs_for_it(api):
    api.engine.paused.set()
    task = asyncio.create_task(api.post("embeddings", input=["a", "b"]))
    await until(lambda: len(api.engine.added) == 2)
    task.cancel()
    await until(lambda: len(api.engine.aborted) == 2)
    assert api.engine.num_live == api.model.admission.num_running == 0


class Counted:
    """A `tokenizers` tokenizer that counts the characters it is given."""

    def __init__(self, backend: Any):
        self.chars, self._backend = 0, backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[Any], **options: Any) -> Any:
        self.chars += sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts)
        return self._backend.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("cut", [{}, {"truncate_prompt_tokens": -1}])
def test_the_query_of_a_ranking_is_tokenized_once_however_many_documents_there_are(cut, monkeypatch):
    counted = Counted(tokenizer().backend)
    monkeypatch.setattr(tokenizer(), "backend", counted)
    query, documents = "fox " * (2_000 if cut else 100), [f"dog {i}" for i in range(200)]

    async def scenario() -> None:
        async with fake_api(supported_tasks=SupportedTasks(names=("score",))) as api:
            answer = await api.post("rerank", query=query, documents=documents, **cut)
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["results"]) == 200 == len(api.engine.added)

    run(scenario())
    assert counted.chars < 2 * (len(query) + sum(map(len, documents)))
