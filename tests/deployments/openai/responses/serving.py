"""The Responses API over a fake engine, and OpenAI's client of it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from deployments.http.context import RequestContext
from deployments.openai.chat_body import ChatBody
from deployments.openai.responses.request_body import ResponsesBody
from deployments.openai.responses.response_builder import ResponseBuilder
from deployments.openai.responses.routes import new_response
from engine.wire.generate_request import GenerateRequest
from tests.deployments.bodies import BODIES
from tests.deployments.fake_api import FakeApi, fake_api
from tests.deployments.openai.chat_models import QWEN, VOCAB_SIZE, answers, chat_tokenizer

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
ARGUMENTS = '{"city": "Zürich"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
_events: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@asynccontextmanager
async def serving(*texts: str, ended: bool = True, **info: Any) -> AsyncGenerator[FakeApi]:
    """Run an API whose model answers one request after the other with these texts, and all others with the last."""
    tokenizer = chat_tokenizer(QWEN)
    scripts = [answers(tokenizer, text, ended=ended) for text in texts]
    order: dict[str, int] = {}

    def script(request: GenerateRequest) -> list[int]:
        i = order.setdefault(request.request_id, len(order))
        return scripts[min(i, len(scripts) - 1)](request)

    info = {"max_model_len": 4096, **info}
    async with fake_api(script, text_model=tokenizer, vocab_size=VOCAB_SIZE, step_ms=1, **info) as api:
        yield api


def client_of(api: FakeApi) -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://fake/v1", api_key="none", http_client=api.client, max_retries=0)


async def ask(api: FakeApi, **body: Any) -> dict[str, Any]:
    """A response that has every field which OpenAI's client expects."""
    response = await api.post("responses", **{"input": "hello", **body})
    assert response.status_code == 200, response.text
    Response.model_validate(response.json())
    return dict(response.json())


async def ask_streamed(api: FakeApi, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each with every field that OpenAI's client expects."""
    response = await api.post("responses", **{"input": "hello", "stream": True, **body})
    assert response.status_code == 200, response.text
    return parse_events(response.text)


async def builder_of(api: FakeApi, **fields: Any) -> ResponseBuilder:
    """The builder of a response, before anything is generated."""
    body = BODIES.kind(ResponsesBody).model_validate(fields)
    body.check()
    chat, context = body.to_chat(body.items, 0, BODIES.kind(ChatBody)), RequestContext("resp_" + "0" * 32, 0, "test")
    response = new_response(body, chat, api.model, context)
    return ResponseBuilder(body, response, await api.model.chat(chat, context))


def parse_events(text: str) -> list[dict[str, Any]]:
    events = []
    for event in text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        _events.validate_python(events[-1])
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def prompt(api: FakeApi) -> str:
    """The prompt of the newest request, as text."""
    return chat_tokenizer(QWEN).decode(api.engine.added[-1].prompt, skip_special_tokens=False)
