"""SmolLM2-135M-Instruct behind the HTTP API: text of several bytes, streams, and tool calls."""

from __future__ import annotations

import asyncio
import json

import jsonschema
import pytest

from benchmarks.real_model.served import TEMPLATE
from benchmarks.real_model.texts import WEATHER, user
from deployments.openai.served.served_model import ModelInfo
from engine.model.checkpoint.resolve import resolve
from engine.model.config import ModelConfig
from tests.deployments.real_api import LIMITS, RealApi, real_api

SCRIPTS = "東京は日本の首都で、", "Москва — это столица России, и ", "Les élèves étudient à l'école où ", "🎉🎂🎈🎁🎊"
ASKED = ("What is the weather in Paris?", "Will it rain in Oslo tomorrow?", "Is it warm in Cairo?")


def run(scenario) -> None:
    async def with_api() -> None:
        folder = resolve("smollm2")
        config = ModelConfig.from_folder(folder)
        info = ModelInfo(
            name="smollm2", root="smollm2", folder=str(folder), max_model_len=2048, vocab_size=config.vocab_size,
            default_sampling={}, request_timeout_s=60.0, admission=LIMITS, supported_tasks=config.supported_tasks,
            chat_template=TEMPLATE.read_text(encoding="utf-8"), tool_call_parser="hermes",
        )  # fmt: skip
        async with real_api(folder, info=info) as api:
            await scenario(api)

    asyncio.run(with_api())


async def pieces(api: RealApi, **body) -> list[str]:
    """The texts of a stream's events."""
    async with api.client.stream("POST", "/v1/completions", json={"stream": True, **body}) as response:
        events = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert events.pop() == "[DONE]"
    return [choice["text"] for event in events for choice in json.loads(event)["choices"]]


def test_a_stream_of_text_of_several_bytes_has_whole_characters_and_is_the_text():
    async def scenario(api: RealApi) -> None:
        for prompt in SCRIPTS:
            body = {"prompt": prompt, "max_tokens": 40, "temperature": 0}
            whole = (await api.complete(**body, ignore_eos=False))["choices"][0]["text"]
            parts = await pieces(api, **body)
            assert "".join(parts) == whole
            assert not whole.isascii() and len(parts) > 5
            assert not any("\ufffd" in part for part in parts[:-1])  # the last may be cut by max_tokens

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_required_tool_calls_parse_and_follow_their_schema(stream):
    async def scenario(api: RealApi) -> None:
        for question in ASKED:
            body = {"messages": user(question), "tools": [WEATHER], "tool_choice": "required", "max_tokens": 100,
                    "parallel_tool_calls": False, "temperature": 0, "stream": stream}  # fmt: skip
            response = await api.client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            name, arguments = streamed_call(response.text) if stream else call(response.json())
            assert name == "get_weather"
            jsonschema.validate(json.loads(arguments), WEATHER["function"]["parameters"])

    run(scenario)


def call(answer: dict) -> tuple[str, str]:
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (found,) = choice["message"]["tool_calls"]
    return found["function"]["name"], found["function"]["arguments"]


def streamed_call(text: str) -> tuple[str, str]:
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if "{" in line]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    parts = [part["function"] for delta in deltas for part in delta.get("tool_calls") or []]
    return "".join(part.get("name") or "" for part in parts), "".join(part.get("arguments") or "" for part in parts)
