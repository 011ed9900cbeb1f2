"""Large bodies: refused before costly work, which never runs on the event loop, where all other requests would wait."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.http import validation
from deployments.http.body import MAX_FIELDS, Number, RequestBody, Whole, parse
from deployments.http.validation import check_json_size
from deployments.openai.chat_body import ChatBody
from deployments.openai.completion_body import CompletionBody, DetokenizeBody
from deployments.openai.responses.request_body import ResponsesBody
from deployments.openai.sampling_body import GenerationBody, SamplingBody
from deployments.openai.template_body import TokenizeBody
from deployments.pooling.request_bodies import EmbeddingBody, RerankBody, ScoreBody
from engine.errors import RequestError
from tests.deployments.bodies import BODIES
from tests.deployments.fake_api import MAX_MODEL_LEN, fake_api, says, tokenizer
from tests.deployments.loop_time import longest_turn, slowness
from tests.deployments.openai.bad_requests import Bad
from tests.examples import examples
from tests.models import with_slow

TEXT = "The quick brown fox. " * 20_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/completions", {"prompt": ["a", TEXT]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/tokenize", {"prompt": TEXT}),
        ("/tokenize", {"messages": [{"role": "user", "content": TEXT}]}),
    ],
)
async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(path, body, monkeypatch):
    tokenized: list[int] = []
    encode = type(tokenizer())._encode

    def recorded(self, text, add_special_tokens):
        tokenized.append(len(text))
        return encode(self, text, add_special_tokens)

    async with fake_api() as api:
        monkeypatch.setattr(type(tokenizer()), "_encode", recorded)
        response = await api.client.post(path, json=body)
        Bad(path, b"", "prompt").check(response)
        assert max(tokenized, default=0) < 100


WORDS_OF_CLIENTS = (
    rf"this model's maximum context length is {MAX_MODEL_LEN} tokens",  # litellm
    r"prompt is too long: ",  # LangChain with version 3 of OpenAI's library, Strands
    rf"prompt is too long[^0-9]*\d+\s*tokens?\s*>\s*{MAX_MODEL_LEN - 1}\b",  # Claude Code
)


@pytest.mark.parametrize("text", ["a b " * 300, "a" * 10**5])
@pytest.mark.parametrize("route", ["completions", "token ids", "chat/completions", "responses", "messages"])
async def test_prompt_that_does_not_fit_has_the_code_and_the_words_that_clients_look_for(text, route, api):
    if route in ("chat/completions", "messages"):
        response = await api.post(route, model="fake", messages=[{"role": "user", "content": text}], max_tokens=5)
    elif route == "responses":
        response = await api.post(route, input=text)
    else:
        response = await api.post("completions", prompt=text if route == "completions" else [5] * MAX_MODEL_LEN)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error.get("code") == (None if route == "messages" else "context_length_exceeded")
    for words in WORDS_OF_CLIENTS:
        assert re.search(words, error["message"])


JSON = {"Content-Type": "application/json"}
PATHS: dict[type[RequestBody], str] = {
    ChatBody: "/v1/chat/completions",
    CompletionBody: "/v1/completions",
    TokenizeBody: "/tokenize",
    DetokenizeBody: "/detokenize",
    EmbeddingBody: "/v1/embeddings",
    ScoreBody: "/v1/score",
    RerankBody: "/v1/rerank",
    ResponsesBody: "/v1/responses",
}
HELLO = {"role": "user", "content": "hello"}
PART = {"type": "text", "text": "a"}
CALL = {"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}


ITEM_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
LONG_IDS = {"request_id": "a" * 10**6, "session_id": "a" * 10**7}
SHORT = ("model", "cache_salt", "user", "safety_identifier")


def function(i: int, properties: dict[str, Any] | None = None) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {}}
    return {"type": "function", "function": {"name": f"f{i}", "parameters": parameters}}


def flat_function(i: int, properties: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", **function(i, properties)["function"]}


def choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def response_format(members: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"key{i}": True for i in range(members)}}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


LARGEST: dict[str, tuple[type[RequestBody], dict[str, Any]]] = {
    "messages": (ChatBody, {"messages": [HELLO] * 4096}),
    "parts": (ChatBody, {"messages": [{"role": "user", "content": [PART] * 1024}] * 7}),
    "one long message": (ChatBody, {"messages": [{"role": "user", "content": 'a"\n' * 3_000_000}]}),
    "tool calls": (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [CALL] * 1000}] * 4}),
    "members of a message": (ChatBody, {"messages": [{**HELLO, **{f"key{i}": 1 for i in range(60_000)}}]}),
    "lists in a message": (ChatBody, {"messages": [{**HELLO, "more": [[]] * 16_000}]}),
    "tools": (ChatBody, {"messages": [HELLO], "tools": [function(i) for i in range(512)]}),
    "schema of a tool": (ChatBody, {"messages": [HELLO], "tools": [function(0, {"x": {"enum": [1] * 99_000}})]}),
    "schema": (
        ChatBody,
        {
            "messages": [HELLO],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1] * 99_000}}},
        },
    ),
    "schema of many members": (ChatBody, {"messages": [HELLO], "response_format": response_format(30_000)}),
    "tool_choice": (ChatBody, {"messages": [HELLO], "tools": [function(0)], "tool_choice": choice("f0")}),
    "chat_template_kwargs": (ChatBody, {"messages": [HELLO], "chat_template_kwargs": {"a": ["b"] * 10**6}}),
    "metadata": (ChatBody, {"messages": [HELLO], "metadata": {f"key{i}": "a" for i in range(65_000)}}),
    "prediction": (ChatBody, {"messages": [HELLO], "prediction": {"type": "content", "content": "a, b: " * 2_500_000}}),
    "prompt": (CompletionBody, {"prompt": "a, b: " * 2_500_000}),
    "prompts": (CompletionBody, {"prompt": ["a" * 10_000] * 1024}),
    "token ids": (CompletionBody, {"prompt": [12345] * 10**6}),
    "lists of token ids": (CompletionBody, {"prompt": [[12345] * 976] * 1024}),
    "stop": (CompletionBody, {"prompt": "a", "stop": ["a" * 10**6] * 15}),
    "stop_token_ids": (CompletionBody, {"prompt": "a", "stop_token_ids": [5] * 1024}),
    "allowed_token_ids": (CompletionBody, {"prompt": "a", "allowed_token_ids": [5] * 2**18}),
    "logit_bias": (CompletionBody, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(10_000)}}),
    "bad_words": (CompletionBody, {"prompt": "a", "bad_words": ["a" * 1000] * 1000}),
    "choice": (CompletionBody, {"prompt": "a", "structured_outputs": {"choice": ["abc"] * 30_000}}),
    "grammar": (
        CompletionBody,
        {"prompt": "a", "structured_outputs": {"grammar": 'start: "a"\n' * 9_000}},
    ),
    "regex": (CompletionBody, {"prompt": "a", "structured_outputs": {"regex": "(a|b)" * 20_000}}),
    "json": (CompletionBody, {"prompt": "a", "structured_outputs": {"json": {"enum": ["abc"] * 14_000}}}),
    "json as text": (CompletionBody, {"prompt": "a", "structured_outputs": {"json": "[" * 10**6}}),
    "guided_json": (CompletionBody, {"prompt": "a", "guided_json": {"enum": ["abc"] * 14_000}}),
    "guided_regex": (CompletionBody, {"prompt": "a", "guided_regex": "(a|b)" * 10**6}),
    "guided_choice": (CompletionBody, {"prompt": "a", "guided_choice": ["abc"] * 30_000}),
    "guided_grammar": (CompletionBody, {"prompt": "a", "guided_grammar": 'start: "a"\n' * 10**6}),
    "many sequences": (
        CompletionBody,
        {"prompt": ["a"] * 2, "n": 128, "logit_bias": {str(i): 1 for i in range(10_000)}},
    ),
    "short texts": (CompletionBody, {"prompt": "a", **dict.fromkeys(SHORT, "a" * 1024), **LONG_IDS}),
    "prompt_cache_key": (CompletionBody, {"prompt": "a", "prompt_cache_key": "a" * 1024}),
    "documents of a chat": (ChatBody, {"messages": [HELLO], "documents": [{"text": "a" * 10_000}] * 1024}),
    "thinking": (ChatBody, {"messages": [HELLO], "thinking": {"type": "enabled"}}),
    "marks of holds": (
        ChatBody,
        {"messages": [HELLO], "cache_control": {"type": "ephemeral"}, "prompt_cache_options": {"mode": "explicit"}},
    ),
    "stream_options": (CompletionBody, {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}),
    "usage": (CompletionBody, {"prompt": "a", "usage": {"include": True}}),
    "text to tokenize": (TokenizeBody, {"prompt": "a, b: " * 2_500_000}),
    "messages to tokenize": (TokenizeBody, {"messages": [HELLO] * 4096}),
    "tools to tokenize": (TokenizeBody, {"messages": [HELLO], "tools": [function(i) for i in range(512)]}),
    "chat_template_kwargs to tokenize": (TokenizeBody, {"prompt": "a", "chat_template_kwargs": {"a": ["b"] * 10**6}}),
    "model to tokenize": (TokenizeBody, {"prompt": "a", "model": "a" * 1024}),
    "model to detokenize": (DetokenizeBody, {"tokens": [5], "model": "a" * 1024}),
    "tokens": (DetokenizeBody, {"tokens": [5] * 10**6}),
    "texts to embed": (EmbeddingBody, {"input": ["a, b: " * 100] * 2048, "truncate_prompt_tokens": -1}),
    "ids to embed": (EmbeddingBody, {"input": [12345] * 10**6}),
    "lists of ids to embed": (EmbeddingBody, {"input": [[12345] * 500] * 2048}),
    "names to embed": (EmbeddingBody, {"input": "a", **dict.fromkeys([*SHORT, "prompt_name"], "a" * 1024)}),
    "id to embed": (EmbeddingBody, {"input": "a", "usage": {"include": True}, **LONG_IDS}),
    "pairs": (ScoreBody, {"queries": ["a, b: " * 600] * 2048, "documents": ["a, b: " * 600] * 2048}),
    "older pairs": (ScoreBody, {"text_1": "a " * 10_000, "text_2": ["a, b: " * 1_000] * 2048}),
    "names to score": (ScoreBody, {"queries": "a", "documents": "b", **dict.fromkeys(SHORT, "a" * 1024)}),
    "id to score": (ScoreBody, {"queries": "a", "documents": "b", "usage": {"include": True}, **LONG_IDS}),
    "instruction": (ScoreBody, {"queries": "a", "documents": "b", "instruction": "a " * 10**5}),
    "documents": (RerankBody, {"query": "a " * 10_000, "documents": [{"text": "a, b: " * 1_000}] * 2048}),
    "names to rank": (RerankBody, {"query": "a", "documents": ["b"], **dict.fromkeys(SHORT, "a" * 1024)}),
    "id to rank": (RerankBody, {"query": "a", "documents": ["b"], "usage": {"include": True}, **LONG_IDS}),
    "instruction to rank": (RerankBody, {"query": "a", "documents": ["b"], "instruction": "a " * 10**5}),
    "items": (ResponsesBody, {"input": [HELLO] * 4096}),
    "calls of items": (ResponsesBody, {"input": [ITEM_CALL] * 4096}),
    "parts of items": (ResponsesBody, {"input": [{"role": "user", "content": [PART] * 1024}] * 7}),
    "members of an item": (ResponsesBody, {"input": [{**HELLO, **{f"key{i}": 1 for i in range(60_000)}}]}),
    "one long input": (ResponsesBody, {"input": 'a"\n' * 2_500_000, "instructions": "a " * 10**6}),
    "tools beside items": (ResponsesBody, {"input": "a", "tools": [flat_function(i) for i in range(512)]}),
    "schema beside items": (
        ResponsesBody, {"input": "a", "tools": [flat_function(0, {"x": {"enum": [1] * 99_000}})]}
    ),
    "settings beside items": (
        ResponsesBody,
        {
            "input": "a",
            "text": {"format": {"type": "json_schema", "schema": {"enum": [1] * 99_000}}},
            "reasoning": {f"key{i}": i for i in range(MAX_FIELDS)},
            "include": ["message.output_text.logprobs"] * 32,
            "previous_response_id": "a" * 256,
        },
    ),
}  # fmt: skip
# bodies that are refused, or their JSON, made where they are needed; and what the refusal names
TOO_LARGE: dict[str, tuple[type[RequestBody], Callable[[], Any], str]] = {
    "messages": (ChatBody, lambda: b'{"messages": [' + b"{}," * 4097 + b"{}]}", "messages"),
    "many messages": (ChatBody, lambda: {"messages": [HELLO] * 300_000}, "objects"),
    "no messages": (ChatBody, lambda: b'{"messages": [' + b"[]," * 5_000_000 + b"[]]}", "lists"),
    "numbers for messages": (ChatBody, lambda: b'{"messages": [' + b"1," * 1_000_000 + b"1]}", "messages"),
    "parts": (ChatBody, lambda: {"messages": [{"role": "user", "content": [PART] * 1025}]}, "messages"),
    "tools": (ChatBody, lambda: {"messages": [HELLO], "tools": [function(1)] * 513}, "tools"),
    "reasoning": (ResponsesBody, lambda: {"input": "a", "reasoning": {str(i): 1 for i in range(60_000)}}, "reasoning"),
    "fields": (ChatBody, lambda: {str(i): 1 for i in range(60_000)}, "fields"),
    "members": (ChatBody, lambda: {str(i): 1 for i in range(1_000_000)}, "members"),
    "prompts": (CompletionBody, lambda: {"prompt": ["a"] * 1_000_000}, "prompt"),
    "prompts of one id": (CompletionBody, lambda: {"prompt": [[1]] * 1_000_000}, "lists"),
    "ids": (CompletionBody, lambda: {"prompt": [1] * 2_000_000}, "values"),
    "stop": (CompletionBody, lambda: {"prompt": "a", "stop": [1] * 1_000_000}, "stop"),
    "bad_words": (CompletionBody, lambda: {"prompt": "a", "bad_words": ["a"] * 1001}, "bad_words"),
    "text for ids": (CompletionBody, lambda: {"prompt": "a", "allowed_token_ids": "a" * 10**7}, "allowed"),
}  # fmt: skip


async def parse_body(kind: type[RequestBody], raw: bytes) -> None:
    """Parse a body as a route does."""
    await check_json_size(raw)
    body = parse(kind, raw)
    if isinstance(body, GenerationBody):
        body.sampling_params({})


# whose fields are read by the same code as another of the bodies
LIKE_OTHERS = (
    "members of an item",
    "texts to embed",
    "lists of ids to embed",
    "ids to embed",
    "pairs",
    "one long input",
    "instruction to rank",
    "chat_template_kwargs to tokenize",
    "lists of token ids",
    "text to tokenize",
    "messages to tokenize",
    "tools to tokenize",
    "older pairs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


@pytest.mark.parametrize("name", with_slow(LARGEST, LIKE_OTHERS))
async def test_largest_value_that_a_field_may_have_holds_the_loop_for_less_than_100_ms(name):
    kind, body = LARGEST[name]
    generates = issubclass(kind, GenerationBody)
    raw = json.dumps({"max_tokens": 1, **body} if generates else body).encode()
    assert len(raw) < 16 * 2**20
    BODIES.parse(kind, raw)
    async with fake_api(vocab_size=2**18) as api:
        took = []
        for _ in range(10):  # the other core may be at work in the same caches
            async with longest_turn() as turn:
                await api.client.post(PATHS[kind], content=raw, headers=JSON)
            took.append(turn.cpu_s)
            if turn.cpu_s < 0.1 * slowness():
                return
        raise AssertionError(took)


@pytest.mark.parametrize("kind", PATHS)
def test_every_field_whose_size_the_client_chooses_is_among_the_largest_bodies(kind):
    shared = SamplingBody if issubclass(kind, SamplingBody) else kind
    tried = {field for tried_kind, body in LARGEST.values() if issubclass(tried_kind, shared) for field in body}
    grows = {name for name, field in kind.model_fields.items() if has_any_size(field.annotation)}
    assert "model" in grows and "temperature" not in grows
    assert grows <= tried, grows - tried


def has_any_size(annotation: Any) -> bool:
    """Whether values of a type can be large: all but numbers, and texts that are listed one by one."""
    if get_origin(annotation) is Literal:
        return False
    if get_origin(annotation) is Annotated and annotation in (Whole, Number):
        return False
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) in (Union, UnionType):
        return any(map(has_any_size, parts))
    return annotation not in (int, float, bool)


@pytest.mark.parametrize("name", TOO_LARGE)
def test_body_that_is_too_large_is_refused_within_100_ms(name):
    kind, make, named = TOO_LARGE[name]
    body, took = make(), []
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    while len(took) < 3 and min(took, default=1.0) >= 0.1:
        started = time.thread_time()
        with pytest.raises(RequestError, match=named) as caught:
            asyncio.run(parse_body(kind, raw))
        took.append((time.thread_time() - started) / slowness())
        assert len(str(caught.value)) < 600
    assert min(took) < 0.1


def test_texts_may_have_any_number_of_the_signs_that_values_are_counted_by():
    texts = ["{[,:" * 100_000, '\\"' * 100_000, '"' * 100_000, "\\" * 100_001, '{"a": [1]}' * 50_000]
    for text in texts:
        asyncio.run(check_json_size(json.dumps({"prompt": text, "user": "a"}).encode()))
    with pytest.raises(RequestError, match="lists"):
        asyncio.run(check_json_size(json.dumps({"prompt": texts, "more": [[]] * 20_000}).encode()))


TEXTS = st.text('"\\{}[]:, a', max_size=12)
DOCUMENTS = st.recursive(
    TEXTS | st.none(), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4)
)


@settings(max_examples=examples(300))
@given(DOCUMENTS, st.integers(1, 5))
def test_values_are_counted_outside_strings_wherever_a_piece_ends(document, piece):
    def count(value: Any) -> list[int]:
        """Objects, lists, members and commas."""
        if not isinstance(value, list | dict):
            return [0, 0, 0, 0]
        members = list(value.values()) if isinstance(value, dict) else value
        own = [isinstance(value, dict), isinstance(value, list), len(value) * isinstance(value, dict)]
        return [sum(each) for each in zip([*own, max(0, len(value) - 1)], *map(count, members), strict=True)]

    for byte, number in zip(validation.MAX_VALUES, count(document), strict=True):
        for limit in {number, number - 1}:
            with (
                mock.patch.object(validation, "PIECE_BYTES", piece),
                mock.patch.dict(validation.MAX_VALUES, {byte: (limit, "values")}, clear=True),
                pytest.raises(RequestError) if number > limit else nullcontext(),
            ):
                asyncio.run(check_json_size(json.dumps(document).encode()))


@pytest.mark.parametrize("text", ['"', '\\"', "\\", '"a\\\\":', '",{["'])
def test_no_text_makes_counting_values_a_loop_over_its_signs(text):
    body = b'["' + text.encode() * (2**20 // len(text))
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "c_call"

    sys.setprofile(count)
    try:
        with suppress(RequestError):
            validation._check_outside_strings(body)
    finally:
        sys.setprofile(None)
    assert 0 < calls <= 16 * len(body) / validation.PIECE_BYTES + 16


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [HELLO], "max_tokens": 1}),
        ("/tokenize", {"prompt": "hello"}),
        ("/v1/completions", {"prompt": "{" * 10_000, "truncate_prompt_tokens": 5, "max_tokens": 1}),
    ],
)
async def test_tokenizing_waits_for_no_other_work_of_the_ingress(path, body):
    """Threads that wait for files, say, or for Ray: here for good."""
    held, loop = threading.Event(), asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as others:
        loop.set_default_executor(others)
        others.submit(held.wait)
        try:
            async with fake_api(says("ok")) as api, asyncio.timeout(60):
                response = await api.client.post(path, json=body)
                assert response.status_code == 200, response.text
        finally:
            held.set()


async def test_words_are_not_tokenized_on_the_event_loop(monkeypatch):
    threads: list[threading.Thread] = []
    token_ids = type(tokenizer()).bad_words_token_ids

    def recorded(self, words):
        threads.append(threading.current_thread())
        return token_ids(self, words)

    monkeypatch.setattr(type(tokenizer()), "bad_words_token_ids", recorded)
    async with fake_api() as api:
        words = [f"word{i}" for i in range(1000)]
        for route, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": [HELLO]})):
            response = await api.post(route, **body, max_tokens=1, bad_words=words)
            assert response.status_code == 200
        assert len(threads) == 2
        assert threading.main_thread() not in threads


async def test_the_loop_turns_and_streams_go_on_while_a_long_prompt_that_fits_is_tokenized(monkeypatch):
    """Half a megabyte. In turns, not in time: without letting go of the GIL the loop would not turn once."""
    tokenizing = threading.Event()
    encode, turns = type(tokenizer())._encode, 0

    def recorded(self, text, add_special_tokens):
        if len(text) < 10**5:
            return encode(self, text, add_special_tokens)
        tokenizing.set()
        try:
            return encode(self, text, add_special_tokens)
        finally:
            tokenizing.clear()

    monkeypatch.setattr(type(tokenizer()), "_encode", recorded)

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += tokenizing.is_set()

    limits = {"max_model_len": 2**20, "max_waiting_tokens": 2**20}
    async with fake_api(says("a" * 1000), **limits) as api:
        counting = asyncio.create_task(count_turns())
        async with longest_turn() as turn:
            response = await api.post("completions", prompt=TEXT + TEXT[:100_000], max_tokens=1)
        counting.cancel()
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["prompt_tokens"] > 10**5
        assert turns > 100
        assert turn.cpu_s < 0.05 * slowness()
