from __future__ import annotations

import asyncio

import openai
import pytest
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

from tests.clients import weather
from tests.clients.weather import CALL_WEATHER, WEATHER

set_tracing_disabled(True)


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
@pytest.mark.parametrize("streamed", [False, True])
def test_agent_calls_its_tool_and_answers(server, kind, streamed):
    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
            agent = Agent("helper", model=kind("obedient", client), tools=[function_tool(weather.get_weather)])
            if not streamed:
                result = await Runner.run(agent, CALL_WEATHER)
            else:
                result = Runner.run_streamed(agent, CALL_WEATHER)
                async for _ in result.stream_events():
                    pass
            assert WEATHER in result.final_output

    asyncio.run(scenario())
