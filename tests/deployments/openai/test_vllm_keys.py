"""Keys of bodies: all that vLLM 0.32 sends are there, as null where there is nothing to say.

The keys are those of its files protocol.py. It sends whole bodies with all of their keys, and chunks of a stream with
those that its code sets.
"""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.deployments.fake_api import ALL_TASKS, FakeApi, fake_api, says

USAGE = "prompt_tokens total_tokens completion_tokens prompt_tokens_details completion_tokens_details"
PARAMS = "kv_transfer_params ec_transfer_params"
CHAT = {
    "": f"id object created model choices service_tier system_fingerprint usage prompt_logprobs prompt_token_ids "
    f"prompt_text metrics {PARAMS}",
    "choices.0": "index message logprobs finish_reason stop_reason token_ids routed_experts",
    "choices.0.message": "role content refusal annotations audio function_call reasoning",
    "usage": USAGE,
    "usage.prompt_tokens_details": "cached_tokens created_cache_tokens multimodal_tokens",
}
COMPLETION = {
    "": f"id object created model choices service_tier system_fingerprint usage metrics {PARAMS}",
    "choices.0": "index text logprobs finish_reason stop_reason token_ids prompt_logprobs prompt_token_ids "
    "routed_experts",
    "usage": USAGE,
}
RESPONSE = {
    "": "id created_at incomplete_details instructions metadata model object output parallel_tool_calls temperature "
    "tool_choice tools top_p background max_output_tokens max_tool_calls previous_response_id prompt reasoning "
    f"service_tier status text top_logprobs truncation usage user presence_penalty frequency_penalty {PARAMS} "
    "input_messages output_messages",
    "usage": "input_tokens input_tokens_details output_tokens output_tokens_details total_tokens",
    "usage.input_tokens_details": "cached_tokens cache_write_tokens input_tokens_per_turn cached_tokens_per_turn",
    "usage.output_tokens_details": "reasoning_tokens tool_output_tokens output_tokens_per_turn "
    "tool_output_tokens_per_turn",
}
LIST = "id object created model data usage"
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
LOGPROBS = "choices.0.logprobs"
WHOLE: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("/v1/chat/completions", MESSAGES, CHAT),
    (
        "/v1/chat/completions",
        {**MESSAGES, "logprobs": True, "top_logprobs": 1},
        {**CHAT, f"{LOGPROBS}.content.0": "token logprob bytes top_logprobs"},
    ),
    ("/v1/completions", {"prompt": "a", "max_tokens": 3}, COMPLETION),
    (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 3, "logprobs": 1},
        {**COMPLETION, LOGPROBS: "text_offset token_logprobs tokens top_logprobs"},
    ),
    ("/v1/responses", {"input": "a", "max_output_tokens": 3}, RESPONSE),
    ("/v1/embeddings", {"input": "a"}, {"": LIST, "data.0": "index object embedding", "usage": USAGE}),
    ("/v1/score", {"text_1": "a", "text_2": "b"}, {"": LIST, "data.0": "index object score", "usage": USAGE}),
    (
        "/v1/rerank",
        {"query": "a", "documents": ["b"]},
        {
            "": "id model usage results",
            "results.0": "index document relevance_score",
            "results.0.document": "text multi_modal",
            "usage": "prompt_tokens total_tokens",
        },
    ),
    ("/tokenize", {"prompt": "a"}, {"": "count max_model_len tokens token_strs"}),
    ("/detokenize", {"tokens": [5]}, {"": "prompt"}),
    (
        "/v1/models",
        {},
        {"": "object data", "data.0": "id object created owned_by root parent max_model_len permission"},
    ),
    ("/v1/completions", {"prompt": 5}, {"": "error", "error": "message type param code"}),
]
CHUNK = "id object created model choices"
STREAMED: list[tuple[str, dict[str, Any], str, str, str]] = [  # keys of a first chunk, of a choice, of a delta
    (
        "chat/completions",
        MESSAGES,
        f"{CHUNK} prompt_token_ids prompt_text",
        "index delta logprobs finish_reason token_ids",
        "content reasoning",
    ),
    ("completions", {"prompt": "a", "max_tokens": 3}, CHUNK,
     "index text logprobs finish_reason stop_reason prompt_token_ids token_ids", ""),
]  # fmt: skip


def at(body: Any, path: str) -> Any:
    for key in path.split(".") if path else []:
        body = body[int(key) if key.isdecimal() else key]
    return body


@pytest.mark.parametrize(("route", "body", "keys"), WHOLE)
async def test_a_body_has_all_keys_of_vllms(route, body, keys):
    async with fake_api(says("xyz"), supported_tasks=ALL_TASKS) as api:
        answer = await (api.client.post(route, json=body) if body else api.client.get(route))
        for path, names in keys.items():
            missing = set(names.split()) - at(answer.json(), path).keys()
            assert not missing, f"{route} {path}: {answer.text}"


@pytest.mark.parametrize(("route", "body", "of_chunk", "of_choice", "of_delta"), STREAMED)
@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}], ids=["plain", "token ids"])
async def test_chunks_of_a_stream_have_all_keys_of_vllms(route, body, of_chunk, of_choice, of_delta, more):
    async with fake_api(says("xyz")) as api:
        chunks = await api.stream(route, **body, **more)
    assert set(of_chunk.split()) <= chunks[0].keys()
    for chunk in chunks:
        assert set(CHUNK.split()) <= chunk.keys()
        (choice,) = chunk["choices"]
        assert set(of_choice.split()) <= choice.keys()
    for chunk in chunks[1:-1]:
        assert set(of_delta.split()) <= at(chunk, "choices.0").get("delta", {}).keys()


async def test_an_answer_can_be_sent_back_with_its_nulls():
    async with fake_api(says("xyz")) as api:
        first = (await api.post("chat/completions", **MESSAGES)).json()["choices"][0]["message"]
        prompts = []
        for said in (first, {"role": "assistant", "content": "xyz"}):
            history = [*MESSAGES["messages"], said, {"role": "user", "content": "b"}]
            answer = await api.post("chat/completions", messages=history, max_tokens=3)
            assert answer.status_code == 200 and "warning" not in answer.headers, answer.text
            prompts.append(api.engine.added[-1].prompt)
        assert prompts[0] == prompts[1]


def client(api: FakeApi) -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=api.client)


async def test_what_vllm_adds_can_be_read_of_an_answer_without_asking_whether_it_is_there():
    async with fake_api(says("xyz")) as api:
        answer: Any = await client(api).chat.completions.create(model="fake", **MESSAGES)
        assert not answer.choices[0].message.reasoning
        assert (answer.prompt_logprobs, answer.prompt_token_ids, answer.choices[0].token_ids) == (None, None, None)
        stream: Any = await client(api).chat.completions.create(model="fake", stream=True, **MESSAGES)
        async for chunk in stream:
            assert not chunk.choices[0].delta.reasoning
            assert chunk.choices[0].token_ids is None
