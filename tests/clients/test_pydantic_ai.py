from __future__ import annotations

import asyncio

import pytest
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelContextWindowExceededError
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.weather import CALL_WEATHER, WEATHER, get_weather


@pytest.fixture(params=["chat", "responses", "messages"])
def model(request, server) -> Model:
    if request.param == "messages":
        return AnthropicModel("obedient", provider=AnthropicProvider(base_url=server, api_key="none"))
    provider = OpenAIProvider(base_url=f"{server}/v1", api_key="none")
    kind = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
    return kind("obedient", provider=provider)


def test_agent_calls_its_tool_and_answers(model):
    agent = Agent(model, tools=[get_weather])
    assert WEATHER in agent.run_sync(CALL_WEATHER).output


def test_agent_streams_what_follows_its_tool(model):
    async def scenario() -> None:
        agent = Agent(model, tools=[get_weather])
        async with agent.run_stream(CALL_WEATHER) as result:
            assert WEATHER in "".join([text async for text in result.stream_text(delta=True)])

    asyncio.run(scenario())


def test_a_prompt_beyond_the_context_is_pydantic_ais_own_error(model):
    with pytest.raises(ModelContextWindowExceededError):
        Agent(model).run_sync("word " * 250_000)
