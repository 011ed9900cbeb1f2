from __future__ import annotations

import asyncio
from typing import Any

import litellm
import pytest

from tests.clients.weather import CALL_WEATHER, PARAMETERS, WEATHER

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
@pytest.mark.parametrize("streamed", [False, True])
def test_completion_with_a_tool_call(server, provider, streamed):
    messages: list[Any] = [{"role": "user", "content": CALL_WEATHER}]

    def ask() -> Any:
        request = {
            "model": f"{provider}/obedient",
            "api_base": server if provider == "anthropic" else f"{server}/v1",
            "api_key": "none",
            "messages": messages,
            "tools": [TOOL],
            "max_tokens": 500,
            "reasoning_effort": "low" if provider == "hosted_vllm" else None,
        }
        answer = litellm.completion(**request, stream=streamed)
        return litellm.stream_chunk_builder(list(answer), messages) if streamed else answer

    message = ask().choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments.replace(" ", "")) == ("get_weather", '{"city":"Paris"}')
    messages += [message, {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": WEATHER}]
    assert WEATHER in ask().choices[0].message.content


def test_a_prompt_beyond_the_context_is_litellms_own_error(server):
    request = {"model": "hosted_vllm/obedient", "api_base": f"{server}/v1", "api_key": "none"}
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**request, messages=[{"role": "user", "content": "word " * 250_000}])


def test_responses_and_their_stream(server):
    async def scenario() -> None:
        request = {"model": "openai/obedient", "api_base": f"{server}/v1", "api_key": "none", "input": "hello"}
        answer = await litellm.aresponses(**request)
        assert "hello" in answer.output_text
        kinds = [event.type async for event in await litellm.aresponses(**request, stream=True)]
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"

    asyncio.run(scenario())
