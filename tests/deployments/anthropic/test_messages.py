"""Anthropic's Messages API over HTTP, by Anthropic's client, through real templates and tokenizers."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from pydantic import TypeAdapter

from deployments.anthropic.message import MessageResponse
from deployments.anthropic.request_bodies import MessagesBody
from deployments.anthropic.routes import event_format
from deployments.frontend.api_keys import hash_key
from deployments.http.context import RequestContext
from deployments.http.middleware import AuthConfig, HeadersMiddleware
from deployments.http.streaming import stream
from deployments.openai.chat_body import ChatBody
from engine.errors import Overloaded
from engine.wire.parts.thinking_budget import ThinkingBudget
from engine.wire.token_delta import ErrorInfo
from tests.deployments.fake_api import FakeApi, fake_api, says
from tests.deployments.openai.chat_models import DEEPSEEK, LLAMA, QWEN, VOCAB_SIZE, answers, chat_tokenizer

if TYPE_CHECKING:  # its import takes two seconds, in each process that collects
    from anthropic import AsyncAnthropic
    from anthropic.types import Message

HELLO: Any = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}]
ARGUMENTS = '{"city": "Zürich"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@asynccontextmanager
async def serving(
    text: str = "", template: str = QWEN, *, ended: bool = True, **info: Any
) -> AsyncGenerator[tuple[AsyncAnthropic, FakeApi]]:
    """Run an API whose model answers `text`."""
    tokenizer = chat_tokenizer(template)
    script = answers(tokenizer, text, ended=ended)
    async with fake_api(script, text_model=tokenizer, vocab_size=VOCAB_SIZE, step_ms=1, **info) as api:
        yield client_of(api), api


def client_of(api: FakeApi, **options: Any) -> AsyncAnthropic:
    from anthropic import AsyncAnthropic

    app = api.client._transport.app  # type: ignore[attr-defined]
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)  # the client takes no httpx
    options = {"api_key": "none", "max_retries": 0, **options}
    return AsyncAnthropic(base_url="http://fake", http_client=httpx2.AsyncClient(transport=transport), **options)


def shown(message: Message) -> list[dict[str, Any]]:
    """Return the content without the ids of calls."""
    for block in message.content:
        if block.type == "tool_use":
            assert block.id.startswith("toolu_")
    return [block.model_dump(exclude={"id"}, exclude_none=True) for block in message.content]


def prompt(api: FakeApi) -> str:
    """Return the newest prompt that the engine was given."""
    return chat_tokenizer(QWEN).decode(api.engine.added[-1].prompt, skip_special_tokens=False)


def thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": "unsigned"}


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


WEATHER = {"type": "tool_use", "name": "weather", "input": {"city": "Zürich"}}
ANSWERS = [
    ("hi", {}, [text_block("hi")], "end_turn"),
    ("", {}, [], "end_turn"),
    ("<think>\nhm\n</think>\n\nhi", {}, [thinking("hm"), text_block("hi")], "end_turn"),
    ("<think>\nhm\n</think>\n\nhi", {"thinking": {"type": "adaptive", "display": "omitted"}}, [text_block("hi")],
     "end_turn"),
    (CALL, {"tools": TOOLS}, [WEATHER], "tool_use"),
    (f"<think>hm</think>Let me see.\n{CALL}\n{CALL}", {"tools": TOOLS},
     [thinking("hm"), text_block("Let me see."), WEATHER, WEATHER], "tool_use"),
    (f"{CALL}\n{CALL}", {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
     [WEATHER], "tool_use"),
    (CALL, {"tools": TOOLS, "tool_choice": {"type": "none"}}, [text_block(CALL)], "end_turn"),
    (f'[{{"name": "weather", "parameters": {ARGUMENTS}}}]', {"tools": TOOLS, "tool_choice": {"type": "any"}},
     [WEATHER], "tool_use"),
    (ARGUMENTS, {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "weather"}}, [WEATHER], "tool_use"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "fields", "content", "reason"), ANSWERS)
async def test_message_has_the_blocks_that_the_model_wrote_and_a_stream_has_the_same(text, fields, content, reason):
    async with serving(text) as (client, api):
        asked: Any = {"model": "fake", "max_tokens": 200, "messages": HELLO, **fields}
        message = await client.messages.create(**asked)
        assert (shown(message), message.stop_reason) == (content, reason)
        async with client.messages.stream(**asked) as events:
            streamed = await events.get_final_message()
        assert (shown(streamed), streamed.stop_reason) == (content, reason)
        assert streamed.usage.model_dump() == message.usage.model_dump()
        counted = await client.messages.count_tokens(
            model="fake", messages=HELLO, **{key: fields[key] for key in fields}
        )
        assert counted.input_tokens == message.usage.input_tokens == len(api.engine.added[0].prompt)


async def test_every_event_is_one_of_anthropics_with_all_of_its_fields_in_order():
    from anthropic.types import RawMessageStreamEvent

    of_anthropic: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
    async with serving(f"<think>hm</think>Let me see.\n{CALL}") as (_, api):
        response = await api.post("messages", max_tokens=200, messages=HELLO, tools=TOOLS, stream=True)
        assert response.headers["content-type"].startswith("text/event-stream")
        order: list[str] = []
        for event in response.text.rstrip("\n").split("\n\n"):
            name, data = event.split("\n")
            body = json.loads(data.removeprefix("data: "))
            assert name == f"event: {body['type']}"
            if body["type"] != "ping":
                of_anthropic.validate_python(body)
            kind = body.get("delta", {}).get("type") or body["type"]
            if order[-1:] != [kind]:
                order.append(kind)
        block = ["content_block_start", "content_block_stop"]
        assert order == [
            "message_start", "ping",
            block[0], "thinking_delta", "signature_delta", block[1],
            block[0], "text_delta", block[1],
            block[0], "input_json_delta", block[1],
            "message_delta", "message_stop",
        ]  # fmt: skip


async def test_tool_call_goes_back_with_its_result_and_the_reasoning():
    async with serving(f"<think>\nhm\n</think>\n\n{CALL}") as (client, api):
        asked: Any = {"model": "fake", "max_tokens": 200, "tools": TOOLS, "system": "Be brief."}
        message = await client.messages.create(messages=HELLO, **asked)
        call = message.content[-1]
        assert call.type == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [text_block("snow")], "is_error": True}
        answer: Any = {"role": "user", "content": [result, text_block("So?")]}
        await client.messages.create(messages=[*HELLO, message.to_param(), answer], **asked)
        assert prompt(api).endswith(
            "<|im_start|>user\nhello<|im_end|>\n"
            f"<|im_start|>assistant\n<think>\nhm\n</think>\n\n\n{CALL}<|im_end|>\n"
            "<|im_start|>tool\nError:\nsnow<|im_end|>\n"
            "<|im_start|>user\nSo?<|im_end|>\n"
            "<|im_start|>assistant\n"
        )


async def test_answer_goes_on_where_a_last_turn_of_the_assistant_ends():
    async with serving("4)") as (client, api):
        turns: Any = [*HELLO, {"role": "assistant", "content": "The answer is ("}]
        message = await client.messages.create(model="fake", max_tokens=20, messages=turns)
        assert shown(message) == [text_block("4)")]
        assert prompt(api).endswith("<|im_start|>assistant\nThe answer is (")


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"max_tokens": 10_000}, "model_context_window_exceeded", None),
        ({"max_tokens": 100, "stop_sequences": ["t", "wo"]}, "stop_sequence", "wo"),
    ],
)
async def test_message_tells_why_it_ended(fields, reason, sequence):
    async with fake_api(says("one, wo, three" * 100)) as api:
        message = await client_of(api).messages.create(model="fake", messages=HELLO, **fields)
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
        assert message.id.startswith("msg_")
        assert api.engine.added[0].params.max_tokens == min(fields["max_tokens"], 512)


async def test_call_that_max_tokens_cuts_off_has_the_arguments_that_are_complete():
    async with serving('{"city": "Zürich", "days": [1, 2', ended=False) as (client, _):
        asked: Any = {"model": "fake", "max_tokens": 30, "messages": HELLO, "tools": TOOLS}
        asked["tool_choice"] = {"type": "tool", "name": "weather"}
        message = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as events:
            streamed = await events.get_final_message()
        assert message.stop_reason == "max_tokens"
        assert shown(message) == shown(streamed)
        assert shown(message)[0]["input"]["city"] == "Zürich"


@pytest.mark.parametrize(
    ("fields", "variables", "warning"),
    [
        ({}, {}, None),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}, None),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, None),
    ],
)
async def test_thinking_is_a_variable_of_the_template(fields, variables, warning):
    async with serving("hi") as (_, api):
        response = await api.post("messages", max_tokens=20, messages=HELLO, **fields)
        assert response.headers.get("warning") == warning
        assert ("<think>" in prompt(api)) == (variables == {"enable_thinking": False})


async def test_thinking_budget_is_that_of_a_chat():
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    async with serving("hi") as (client, api):
        await client.messages.create(model="fake", max_tokens=20, messages=HELLO, thinking=thinking)
        budget = ThinkingBudget.of(api.engine.added[0].params)
        assert budget is not None and budget.tokens == 1024
    async with serving("hi", LLAMA) as (_, api):
        response = await api.post("messages", max_tokens=20, messages=HELLO, thinking=thinking)
        assert response.headers["warning"] == '299 manta "ignored: thinking.budget_tokens"'


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        ({"thinking": {"type": "disabled"}}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"context_management": {"edits": []}}, "context_management"),
    ],
)
async def test_field_without_effect_is_named_in_a_warning(fields, warning):
    async with serving("hi</think>", DEEPSEEK) as (_, api):
        for stream in (False, True):
            response = await api.post("messages", max_tokens=20, messages=HELLO, stream=stream, **fields)
            assert response.headers["warning"] == f'299 manta "ignored: {warning}"'


async def test_schema_of_the_output_is_enforced():
    async with serving("{}") as (client, api):
        asked: Any = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
        await client.messages.create(model="fake", max_tokens=20, messages=HELLO, **asked)
        structure = api.engine.added[0].params.structured_outputs
        assert structure is not None and '"city"' in structure.text


REFUSED = [
    ("NotFoundError", "not_found_error", {"model": "other"}, "other"),
    ("BadRequestError", "invalid_request_error", {"extra_body": {"temperature": -3}}, "temperature"),
    ("BadRequestError", "invalid_request_error", {"messages": []}, "messages"),
    ("BadRequestError", "invalid_request_error", {"max_tokens": 0}, "max_tokens"),
    ("BadRequestError", "invalid_request_error", {"messages": [{"role": "user", "content": "a b " * 4000}]},
     "prompt is too long: 1234 tokens > 511 maximum"),
    ("BadRequestError", "invalid_request_error", {"tools": [{"name": "a", "input_schema": {"type": "array"}}]},
     "tools[0].input_schema"),
    ("BadRequestError", "invalid_request_error", {"tool_choice": {"type": "any"}}, "tool_choice"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "fields", "says"), REFUSED)
async def test_errors_have_anthropics_shape_and_its_client_knows_them(kind, name, fields, says):
    import anthropic

    async with serving("hi") as (client, api):
        asked: Any = {"model": "fake", "max_tokens": 5, "messages": HELLO, **fields}
        for stream in (False, True):
            with pytest.raises(getattr(anthropic, kind)) as caught:
                await client.messages.create(stream=stream, extra_headers={"X-Request-Id": "r1"}, **asked)
            error = caught.value.body
            assert error.keys() == {"type", "error", "request_id"}
            assert (error["type"], error["error"]["type"], error["request_id"]) == ("error", name, "r1")
            assert says in error["error"]["message"]
            assert caught.value.request_id == "r1"
        assert not api.engine.added


@pytest.mark.parametrize("streamed", [True, False])
async def test_full_queue_is_a_rate_limit_that_says_when_to_come_again(streamed):
    import anthropic

    async with serving("hi") as (client, api):
        api.engine.refusal = ErrorInfo.of(Overloaded("the queue is full"))
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(model="fake", max_tokens=5, messages=HELLO, stream=streamed)
        assert caught.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
        assert caught.value.response.headers["retry-after"] == "1"


async def test_loss_of_the_replica_ends_a_stream_with_an_error_event():
    async with serving("one two three " * 100, max_replays=0) as (_, api):
        chat = MessagesBody.model_validate({"messages": HELLO, "max_tokens": 400, "stream": True}).for_chat(
            512, ChatBody
        )
        output = await api.model.chat(chat, RequestContext("msg-1", 0, "test"))
        scope = {"type": "http", "headers": [(b"x-request-id", b"r1")]}
        event_stream = await stream(MessageResponse("msg-1", output, 9).events(), event_format(scope))
        api.engine.paused.set()
        api.replica.fail("rank 0 died")
        *_, error = [event async for event in event_stream.body_iterator if event]
        assert isinstance(error, bytes)
        name, data = error.decode().rstrip().split("\n")
        assert name == "event: error"
        body = json.loads(data.removeprefix("data: "))
        assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", "overloaded_error", "r1")


async def test_header_that_is_no_text_is_refused_in_the_same_shape_before_serve_sees_it():
    async with serving("hi") as (_, api):
        app = HeadersMiddleware(api.client._transport.app)  # type: ignore[attr-defined]
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://fake") as client:
            headers = {b"x-session-id": b"\xff", b"x-request-id": b"r1"}
            response = await client.post("/v1/messages", headers=headers, json={})
            assert response.status_code == 400 and response.headers["request-id"] == "r1"
            assert response.json()["type"] == "error" and "x-session-id" in response.json()["error"]["message"]


async def test_error_of_a_chat_is_told_in_the_words_of_the_message():
    async with serving("hi", tool_call_parser="none") as (_, api):
        response = await api.post("messages", max_tokens=5, messages=HELLO, tools=TOOLS)
        assert "tool_choice must be of the type any or tool" in response.json()["error"]["message"]
        choice = {"type": "any"}
        schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
        tools = [{"name": "f", "input_schema": schema}]
        response = await api.post("messages", max_tokens=5, messages=HELLO, tools=tools, tool_choice=choice)
        assert "tools[0].input_schema must be" in response.json()["error"]["message"]


async def test_errors_of_the_middleware_have_the_same_shape_and_both_kinds_of_keys_are_taken(tmp_path):
    import anthropic

    file = tmp_path / "keys"
    file.write_text(f"alice:{hash_key('sk-a')}\n")
    async with fake_api(says("hi"), auth=AuthConfig(api_keys_file=str(file), max_body_bytes=1000)) as api:
        asked: Any = {"model": "fake", "max_tokens": 5, "messages": HELLO}
        for options in ({"api_key": "sk-a"}, {"api_key": None, "auth_token": "sk-a"}):
            assert (await client_of(api, **options).messages.create(**asked)).content
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client_of(api, api_key="sk-x").messages.create(**asked)
        assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        with pytest.raises(anthropic.APIStatusError) as too_large:
            await client_of(api, api_key="sk-a").messages.create(system="a" * 1000, **asked)
        assert too_large.value.status_code == 413
        assert too_large.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]
